import pytest

from coordinator.simulation.absence import Pause
from coordinator.simulation.simulated_worker import SimulatedWorker
from coordinator.simulation.timeline import Activity, Lane, Span


def worker(*pauses: Pause, seconds: float = 2.0, factor: float = 1.0) -> SimulatedWorker:
    return SimulatedWorker(0, lambda: seconds, factor, pauses, Lane(0))


@pytest.mark.parametrize(
    ("pauses", "end"),
    [
        ([], 12.0),
        ([Pause(0, 5.0, 3.0)], 12.0),
        ([Pause(0, 8.0, 3.0)], 13.0),
        ([Pause(0, 11.0, 3.0)], 15.0),
        ([Pause(0, 12.0, 3.0)], 12.0),
        # The second comes while the first has put off the end.
        ([Pause(0, 14.0, 1.0), Pause(0, 11.0, 3.0)], 16.0),
    ],
)
def test_a_computation_is_longer_by_what_falls_into_it_of_pauses(pauses: list[Pause], end: float) -> None:
    assert worker(*pauses).compute(10.0) == end


def test_a_slow_worker_computes_for_so_many_times_as_long() -> None:
    assert worker(factor=3.0).compute(10.0) == 16.0


def test_what_is_begun_and_not_finished_counts_until_now() -> None:
    one = worker()
    one.compute(10.0)
    one.settle(11.5)
    assert one.computed == 1.5
    one.settle(20.0)
    assert one.computed == 1.5
    assert one.lane is not None
    assert one.lane.spans == [Span(Activity.COMPUTE, 10.0, 11.5)]


def test_waiting_and_being_dead_are_counted() -> None:
    one = worker()
    one.is_waiting, one.asked_at = True, 1.0
    one.wait_over(1.5)
    one.died_at = 2.0
    one.settle(5.0)
    assert (one.waited, one.absent) == (0.5, 3.0)
    assert repr(one) == "<SimulatedWorker 0: 0 steps, died at 2 s>"
