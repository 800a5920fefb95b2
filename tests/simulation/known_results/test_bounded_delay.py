import numpy as np
import pytest

from coordinator.simulation.known_results import bounded_delay
from tests.simulation.known_results.measured_once import measured_once


@pytest.fixture(scope="module")
def measured() -> bounded_delay.BoundedDelays:
    return measured_once(bounded_delay)


def test_idle_time_falls_from_about_half_to_a_few_percent(measured: bounded_delay.BoundedDelays) -> None:
    for shares in (measured.idle_shares, measured.our_idle_shares):
        assert 0.4 < shares[0] < 0.65
        assert shares[-1] < 0.03
        assert (np.diff(shares) <= 0).all()


def test_a_loss_is_reached_first_at_a_delay_in_between(measured: bounded_delay.BoundedDelays) -> None:
    assert measured.best in {4, 8}
    assert measured.seconds.min() < 0.6 * measured.seconds[0]
    assert measured.seconds.min() < 0.8 * measured.seconds[-1]
