import math

import numpy as np
import pytest

from coordinator.testbed.experiment import SEQUENTIAL, Trial
from coordinator.testbed.results import LossCurve, spikes_of


def of(losses: list[float]) -> LossCurve:
    return LossCurve(
        trial=Trial(SEQUENTIAL, 1),
        seed=0,
        losses=np.array(losses),
        times=0.5 * np.arange(1, len(losses) + 1),
        mean_staleness=0.0,
        seconds=1.0,
        accuracy=0.25,
    )


def test_the_smoothed_loss_is_the_mean_of_the_last_ten() -> None:
    smoothed = of([float(number) for number in range(30)]).smoothed
    assert len(smoothed) == 30
    assert smoothed[0] == 0
    assert smoothed[1] == pytest.approx(0.5)
    assert smoothed[29] == pytest.approx(np.mean(range(20, 30)))


def test_one_nan_loss_affects_only_ten_smoothed_losses() -> None:
    smoothed = of([1.0] * 10 + [np.nan] + [1.0] * 20).smoothed
    assert np.isnan(smoothed[10:20]).all()
    assert smoothed[20:] == pytest.approx(np.ones(11))


def test_the_final_loss_is_the_mean_of_the_last_tenth() -> None:
    assert of([5.0] * 18 + [1.0, 3.0]).final_loss == 2.0
    assert of([4.0]).final_loss == 4.0


def test_batches_are_counted_until_the_smoothed_loss_is_first_below() -> None:
    curve = of([2.0] * 10 + [0.0] * 20 + [9.0] * 10)
    assert curve.batches_to(1.0) == 16
    assert curve.batches_to(3.0) == 1
    assert of([2.0] * 30).batches_to(1.0) is None


def test_the_text_of_a_curve_has_its_figures() -> None:
    assert str(of([2.0] * 30)) == "sequential: 0 spikes, final loss 2.000, accuracy 25.0%, 1 s"


def test_the_time_is_that_of_the_minibatch_that_reached_the_loss() -> None:
    curve = of([2.0] * 10 + [0.0] * 20)
    assert (curve.batches_to(1.0), curve.seconds_to(1.0)) == (16, 8.0)
    assert curve.seconds_to(-1.0) is None


@pytest.mark.parametrize(
    ("losses", "spikes"),
    [
        ([], []),
        ([3, 2, 1, 0.5], []),
        ([1, 1.05, 1, 1.08, 1], []),
        ([1, 1.5, 1], [0.5]),
        ([1, 1.05, 1.1, 1.15, 1.2], [0.2]),  # in small steps, and it stays there there
        ([1, 2, 3, 4], [3]),
        ([1, 2, 1.5, 2], [1, 0.5]),  # the second begins before the first has come back to where it began
        ([1, 2, 1.95, 2.05, 1], [1.05]),  # small changes at the top are not separate spikes
        ([3, 1, 1.5, 1, 0.5, 0.9, 0.3], [0.5, 0.4]),
        ([1, math.nan, math.nan], [math.inf]),
        ([1, math.inf, 1], [math.inf]),
        ([math.nan, math.nan], []),  # high from the beginning: it never rose
    ],
)
def test_a_spike_is_a_rise_and_ends_with_a_fall(losses: list[float], spikes: list[float]) -> None:
    assert spikes_of(losses) == pytest.approx(spikes)


def test_a_rise_counts_from_the_least_since_the_last_spike() -> None:
    assert spikes_of([1, 1.06, 1.12]) == pytest.approx([0.12])
    assert spikes_of([1, 1.06, 0.9, 0.96]) == []
