"""Tests that the counts of real steps and their recorded times are of the same run."""

import numpy as np
import pytest

from coordinator.simulation.rules import BoundedDelay
from coordinator.testbed.real_steps import RealSteps
from coordinator.testbed.step_times import ASKED, COMPUTED, FINISHED, PULLED, Sleeps

MAX_DELAY = 1
BOUNDED_DELAY = BoundedDelay(MAX_DELAY)


@pytest.mark.long
def test_counts_and_recorded_times_are_of_the_same_steps(strategy) -> None:
    sleeps = Sleeps(median=0.03, slow_factor=3.0)
    run = RealSteps(strategy, BOUNDED_DELAY, 2, sleeps).run(1.5)
    assert run.seconds >= 1.5
    pushes = int(run.histogram.sum())
    # At each end of the run, a step of each worker may be counted and not recorded, or vice versa.
    assert abs(sum(map(len, run.recorded)) - pushes) <= 4
    assert abs(run.updates - pushes) <= 4
    assert run.histogram[MAX_DELAY + 1 :].sum() == 0
    assert 0 < run.waited < 2 * run.seconds
    for steps, least in zip(run.recorded, [sleeps.table[0], 3 * sleeps.table[0]], strict=True):
        assert len(steps) >= 2
        assert (np.diff(steps[:, [ASKED, PULLED, COMPUTED, FINISHED]], axis=1) >= 0).all()
        assert (steps[1:, ASKED] >= steps[:-1, FINISHED]).all()
        assert (steps[:, COMPUTED] - steps[:, PULLED] >= least).all()
    # No step is left, and the next run continues.
    assert strategy.done()
