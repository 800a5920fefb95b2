"""Rows of the paper: the staleness of n-softsync with 30 learners, and what modulation does for a large n."""

import numpy as np
import pytest

from coordinator.simulation.known_results import softsync
from tests.simulation.known_results.measured_once import measured_once


@pytest.fixture(scope="module")
def measured() -> softsync.Softsync:
    return measured_once(softsync)


def test_the_mean_staleness_is_about_n(measured: softsync.Softsync) -> None:
    assert measured.means == pytest.approx(measured.splits, rel=0.1)


def test_less_than_one_push_in_ten_thousand_is_staler_than_twice_n(measured: softsync.Softsync) -> None:
    assert measured.over_twice < 1e-4


def test_a_large_n_learns_with_modulation_alone(measured: softsync.Softsync) -> None:
    few, many, modulated = (measured.learned[name].losses for name in measured.learned)
    assert few[-1] < 0.25 * few[0]
    assert modulated[-1] < 0.25 * modulated[0]
    assert np.min(many[len(many) // 2 :]) > many[0]
