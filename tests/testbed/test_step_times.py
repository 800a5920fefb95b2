import numpy as np
import pytest
import tensorflow as tf

from coordinator.simulation.rules import Asynchronous
from coordinator.simulation.simulated_cluster import simulate
from coordinator.testbed.step_times import Run, Sleeps, StepTimes


def recorded(*, steps: int, pull: float, compute: float, push: float, dispatch: float, begin: float = 0.0):
    """Returns the recorded times of a worker whose steps are all equal."""
    requested = begin + np.arange(steps) * (pull + compute + push + dispatch)
    return np.stack(
        [requested, requested + pull, requested + pull + compute, requested + pull + compute + push], axis=1
    )


def run_of(*recorded, waited: float = 0.0) -> Run:
    return Run(seconds=1.0, updates=1, histogram=np.array([1]), waited=waited, recorded=recorded)


def test_the_parts_of_a_step_lie_between_its_recorded_times() -> None:
    quick = recorded(steps=10, pull=0.01, compute=0.1, push=0.02, dispatch=0.03)
    slow = recorded(steps=5, pull=0.01, compute=0.3, push=0.02, dispatch=0.03)
    times = StepTimes.of([run_of(quick, slow), run_of(quick, slow)])
    assert times.computed[0] == pytest.approx([0.1] * 20)
    assert times.computed[1] == pytest.approx([0.3] * 10)
    # The time between the last step of a run and the first one of the next is ignored.
    assert times.dispatch == pytest.approx([0.03] * (2 * 9 + 2 * 4))
    assert (times.pull, times.push) == pytest.approx((0.01, 0.02))


def test_the_waiting_time_of_a_rule_is_not_part_of_a_pull() -> None:
    waiting = recorded(steps=10, pull=0.21, compute=0.1, push=0.02, dispatch=0.03)
    assert StepTimes.of([run_of(waiting, waited=2.0)]).pull == pytest.approx(0.01)


@pytest.mark.parametrize(("pull", "push"), [(0.01, 0.02), (0.02, 0.01)])
def test_a_simulated_step_takes_as_long_as_the_real_one(pull: float, push: float) -> None:
    steps = recorded(steps=10, pull=pull, compute=0.1, push=push, dispatch=0.03)
    result = simulate(StepTimes.of([run_of(steps)]).setting(Asynchronous()))
    assert result.updates_per_second == pytest.approx(1 / 0.16, rel=1e-3)
    assert result.computed[0] / result.gradients == pytest.approx(0.1 + max(pull - push, 0))


def test_steps_draw_from_the_table_and_the_slow_worker_a_multiple() -> None:
    sleeps = Sleeps(median=0.05, slow_factor=3.0)
    drawn = tf.function(lambda worker: sleeps.draw(worker, 2), autograph=False)
    of_usual, of_slow = ([float(drawn(tf.constant(worker, tf.int64))) for _ in range(100)] for worker in (0, 2))
    assert {round(seconds, 9) for seconds in of_usual} <= {round(seconds, 9) for seconds in sleeps.table}
    assert {round(seconds / 3, 9) for seconds in of_slow} <= {round(seconds, 9) for seconds in sleeps.table}
    assert len(set(of_usual)) > 20
    assert np.mean(of_usual) == pytest.approx(sleeps.mean, rel=0.15)
