import math

import pytest
import simpy

from coordinator.errors import SettingError
from coordinator.simulation.simulated_tasks import (
    Activity,
    Death,
    Pause,
    ReusableEvent,
    SimulatedWorker,
    Span,
    Timeline,
)


def worker(*pauses: Pause, seconds: float = 2.0, factor: float = 1.0) -> SimulatedWorker:
    return SimulatedWorker(0, lambda: seconds, factor, pauses, Timeline(0))


@pytest.mark.parametrize(
    ("pauses", "end"),
    [
        ([], 12.0),
        ([Pause(0, 5.0, 3.0)], 12.0),
        ([Pause(0, 8.0, 3.0)], 13.0),
        ([Pause(0, 11.0, 3.0)], 15.0),
        ([Pause(0, 12.0, 3.0)], 12.0),
        # The second pause begins while the first delays the end.
        ([Pause(0, 14.0, 1.0), Pause(0, 11.0, 3.0)], 16.0),
    ],
)
def test_pauses_within_a_computation_lengthen_it(pauses: list[Pause], end: float) -> None:
    assert worker(*pauses).compute(10.0) == end


def test_a_slow_worker_takes_a_factor_as_long() -> None:
    assert worker(factor=3.0).compute(10.0) == 16.0


def test_an_unfinished_computation_counts_until_now() -> None:
    one = worker()
    one.compute(10.0)
    one.settle(11.5)
    assert one.computed == 1.5
    one.settle(20.0)
    assert one.computed == 1.5
    assert one.timeline is not None
    assert one.timeline.spans == [Span(Activity.COMPUTE, 10.0, 11.5)]


def test_times_of_waiting_and_of_being_dead_are_counted() -> None:
    one = worker()
    one.is_waiting, one.asked_at = True, 1.0
    one.end_wait(1.5)
    one.died_at = 2.0
    one.settle(5.0)
    assert (one.waited, one.absent) == (0.5, 3.0)
    assert repr(one) == "<SimulatedWorker 0: 0 steps, died at 2 s>"


def test_an_event_happens_as_often_as_it_is_scheduled() -> None:
    environment, seen = simpy.Environment(), []

    def happen(event: ReusableEvent) -> None:
        seen.append((environment.now, event.worker))
        if len(seen) < 3:
            event.schedule_in(2.0)

    ReusableEvent(environment, happen, "me").schedule_in(1.0)
    environment.run()
    assert seen == [(1.0, "me"), (3.0, "me"), (5.0, "me")]


def test_an_event_that_is_cancelled_does_not_happen() -> None:
    environment, seen = simpy.Environment(), []
    events = [ReusableEvent(environment, lambda event: seen.append(event.worker), name) for name in ("one", "other")]
    for event in events:
        event.schedule_in(1.0)
    events[0].cancel()
    environment.run()
    assert seen == ["other"]


def test_a_timeline_has_activities_that_took_time_in_order() -> None:
    timeline = Timeline(3)
    timeline.add(Activity.COMPUTE, 0.0, 1.0)
    timeline.add(Activity.WAIT, 1.0, 1.0)
    timeline.add(Activity.WAIT, 1.5, 2.0)
    assert timeline.spans == [Span(Activity.COMPUTE, 0.0, 1.0), Span(Activity.WAIT, 1.5, 2.0)]
    assert timeline.known_until == math.inf


def test_activities_after_a_death_are_removed() -> None:
    timeline = Timeline(3)
    for start in (0.0, 1.0, 2.0):
        timeline.add(Activity.COMPUTE, start, start + 1.0)
    timeline.truncate(1.5)
    assert timeline.spans == [Span(Activity.COMPUTE, 0.0, 1.0), Span(Activity.COMPUTE, 1.0, 1.5)]


def test_a_full_timeline_is_known_until_its_end() -> None:
    timeline = Timeline(3)
    for start in range(5000):
        timeline.add(Activity.COMPUTE, start, start + 1)
    assert timeline.known_until == len(timeline.spans) == 1000


@pytest.mark.parametrize("make", [lambda: Pause(0, -1.0, 1.0), lambda: Pause(0, 1.0, -1.0), lambda: Death(0, math.nan)])
def test_times_before_the_beginning_are_refused(make) -> None:
    with pytest.raises(SettingError, match="must be a number of seconds of at least 0"):
        make()


def test_a_death_is_permanent_unless_a_return_is_given() -> None:
    assert Death(3, 1.0).back_after == math.inf
