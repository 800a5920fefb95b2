import numpy as np
import pytest

from coordinator.testbed.cell import SEQUENTIAL, Cell
from coordinator.testbed.loss_curve import Curve


def of(losses: list[float]) -> Curve:
    return Curve(Cell(SEQUENTIAL, 1), np.array(losses), mean_staleness=0.0, seconds=1.0)


def test_the_smoothed_loss_is_the_mean_of_the_last_ten() -> None:
    smoothed = of([float(number) for number in range(30)]).smoothed
    assert len(smoothed) == 30
    assert smoothed[0] == 0
    assert smoothed[1] == pytest.approx(0.5)
    assert smoothed[29] == pytest.approx(np.mean(range(20, 30)))


def test_one_loss_that_is_no_number_spoils_ten_smoothed_ones_and_no_more() -> None:
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


def test_it_tells_its_figures() -> None:
    assert str(of([2.0] * 30)) == "sequential: 0 spikes, final loss 2.000, 1 s"
