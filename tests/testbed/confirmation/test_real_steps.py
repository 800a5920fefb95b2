"""What is counted of real steps, and what they note, is the same run."""

import numpy as np
import pytest

from coordinator.testbed.confirmation.confirmed_rule import MAX_DELAY, RULES
from coordinator.testbed.confirmation.real_steps import RealSteps
from coordinator.testbed.confirmation.sleeps import Sleeps
from coordinator.testbed.confirmation.step_times import ASKED, COMPUTED, FINISHED, PULLED

BOUNDED_DELAY = RULES[-1]


def test_what_is_counted_and_what_is_noted_are_of_the_same_steps(strategy) -> None:
    sleeps = Sleeps(median=0.03, slow_factor=3.0)
    run = RealSteps(strategy, BOUNDED_DELAY, 3, sleeps).run(1.5)
    counted, noted = run.counted, run.noted
    assert counted.seconds >= 1.5
    pushes = int(counted.histogram.sum())
    # At each end of the run a step of each worker may be counted and not noted, or the other way round.
    assert abs(sum(map(len, noted)) - pushes) <= 6
    assert abs(counted.updates - pushes) <= 6
    assert counted.histogram[MAX_DELAY + 1 :].sum() == 0
    assert 0 < counted.waited < 3 * counted.seconds
    for steps, least in zip(noted, [sleeps.table[0], sleeps.table[0], 3 * sleeps.table[0]], strict=True):
        assert len(steps) >= 2
        assert (np.diff(steps[:, [ASKED, PULLED, COMPUTED, FINISHED]], axis=1) >= 0).all()
        assert (steps[1:, ASKED] >= steps[:-1, FINISHED]).all()
        assert (steps[:, COMPUTED] - steps[:, PULLED] >= least).all()
    # Nothing is left to do, and the next run goes on.
    assert strategy.done()


def test_a_worker_that_runs_out_of_steps_is_an_error(strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = RealSteps(strategy, BOUNDED_DELAY, 2, Sleeps(median=0.001))
    # As if sleeps were far longer than they are, so that few steps are thought to be enough.
    monkeypatch.setattr(Sleeps, "mean", 1e6)
    with pytest.raises(RuntimeError, match="A worker has run out of steps within"):
        steps.run(20.0)
    assert strategy.done()
