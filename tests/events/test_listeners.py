"""Tests of callbacks for events, and of the events that a cluster records."""

import dataclasses
import gc
import threading
import weakref

import pytest

from coordinator.errors import ParameterServerLost, Rollback, StrategyClosedError
from coordinator.events.event_stream import Event, EventStream
from coordinator.events.trace import Listeners
from coordinator.testing.fake_runtime import FakeRuntime, Gate
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, check_events, index_of, running_scheduler


def fail(_: int) -> None:
    raise ValueError("no")


def taken(scheduler: Scheduler, received: list[Event]) -> list[Event]:
    """Returns the events that a callback has got since the last call."""
    scheduler.settled(LIMIT)
    events, received[:] = [*received], []
    return events


def test_a_callback_gets_the_events_from_its_registration_to_the_end() -> None:
    received: list[Event] = []
    with running_scheduler(FakeRuntime(1)) as scheduler:
        scheduler.schedule(index_of, "before").result(LIMIT)
        scheduler.settled(LIMIT)
        scheduler.listeners.on_event(received.append)
        scheduler.schedule(index_of, "step").result(LIMIT)
        started, finished = taken(scheduler, received)
        assert (started.kind, started.task, started.name) == ("closures_started", "worker 0", "step")
        assert (finished.kind, finished.task, finished.name) == ("closures_finished", "worker 0", "step")
        assert finished.count == 1
        assert finished.seconds >= 0
        assert started.time <= finished.time
        scheduler.schedule(fail, "broken").exception(LIMIT)
        with pytest.raises(ValueError, match="no"):
            scheduler.join(LIMIT)
        *_, failed = taken(scheduler, received)
        assert (failed.kind, failed.name, failed.detail) == ("closures_failed", "broken", "ValueError")
        gate = Gate(scheduler.servers)
        scheduler.schedule(gate, "at the end")
        gate.wait_arrived()
    assert ("closures_cancelled", "at the end") in [(event.kind, event.name) for event in received]


def test_a_callback_that_is_stopped_is_not_kept() -> None:
    class Callback:
        def __call__(self, event: Event) -> None: ...

    callback = Callback()
    kept = weakref.ref(callback)
    listeners = Listeners(EventStream(), LIMIT)
    stop = listeners.on_event(callback)
    for _ in range(2):
        stop()
    del callback, stop
    gc.collect()
    assert kept() is None
    listeners.close()


def test_a_callback_that_raises_is_logged_and_called_again(caplog: pytest.LogCaptureFixture) -> None:
    stream, received = EventStream(), []
    listeners = Listeners(stream, LIMIT)
    errors = [ValueError("refused"), SystemExit(), KeyboardInterrupt()]

    def take(event: Event) -> None:
        received.append(event.name)
        if errors:
            raise errors.pop(0)

    stop = listeners.on_event(take)
    for name in ("first", "second", "third", "good"):
        stream.record("rule_changed", name=name)
    stop()
    stream.record("rule_changed", name="after the end")
    listeners.close()
    assert received == ["first", "second", "third", "good"]
    assert caplog.text.count("for events raised an error; training continues") == 3
    with pytest.raises(StrategyClosedError, match="the strategy is closed"):
        listeners.on_event(take)
    with pytest.raises(TypeError, match="takes a function"):
        listeners.on_event(None)


def test_a_callback_may_close_what_calls_it_or_not_return(caplog: pytest.LogCaptureFixture) -> None:
    """One that does not return is abandoned at the end."""
    stream, entered, may_return, closed = EventStream(), threading.Event(), threading.Event(), threading.Event()
    listeners = Listeners(stream, close_timeout=0.01)
    listeners.on_event(lambda _: (entered.set(), may_return.wait(LIMIT)))
    listeners.on_event(lambda _: (entered.wait(LIMIT), listeners.close(), closed.set()))
    stream.record("rule_changed")
    assert closed.wait(LIMIT)
    assert "A callback for events has not returned for 0.01 s; its thread is left behind." in caplog.text
    may_return.set()


def test_dropped_events_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    stream, entered, may_return = EventStream(capacity=2), threading.Event(), threading.Event()
    listeners = Listeners(stream, LIMIT)
    listeners.on_event(lambda _: (entered.set(), may_return.wait(LIMIT)))
    stream.record("rule_changed")
    assert entered.wait(LIMIT)
    for _ in range(5):
        stream.record("rule_changed")
    may_return.set()
    listeners.close()
    assert "3 events were dropped before the callback" in caplog.text


def test_the_loss_of_a_worker_and_its_closures_are_events() -> None:
    runtime, received = FakeRuntime(2), []
    with running_scheduler(runtime, dataclasses.replace(OPTIONS, max_attempts=1)) as scheduler:
        scheduler.listeners.on_event(received.append)
        gate = Gate(runtime)
        future = scheduler.schedule(gate, "deadly", worker=1)
        gate.wait_arrived()
        runtime.kill(1)
        assert future.exception(LIMIT) is not None
        found = {event.kind: (event.task, event.name) for event in taken(scheduler, received)}
        assert found["function_quarantined"] == ("worker 1", "deadly")
        assert found["worker_lost"] == ("worker 1", "")
        runtime.restart(1)
        wait_until(scheduler.cluster.workers[1].healthy)
        assert [(event.kind, event.task) for event in taken(scheduler, received)] == [("worker_returned", "worker 1")]
        scheduler.cluster.remove_worker(scheduler.cluster.add_worker("new:1"))
        joined, *_, left = taken(scheduler, received)
        assert (joined.kind, joined.task, joined.detail) == ("worker_joined", "worker 2", "new:1")
        assert (left.kind, left.task) == ("worker_left", "worker 2")
    check_events(scheduler)


def test_a_recovery_is_an_event_with_the_steps_that_are_lost() -> None:
    runtime, received = FakeRuntime(1), []

    def recover() -> Rollback:
        runtime.restore_parameter_server()
        return Rollback(
            parameter_servers=("/job:ps/task:0",), checkpoint="ckpt-3", step_before=30, step_after=21, seconds=0.1
        )

    with running_scheduler(runtime) as scheduler:
        scheduler.recovery.recover_with(recover)
        scheduler.listeners.on_event(received.append)
        runtime.lose_parameter_server()
        wait_until(lambda: scheduler.cluster.statistics().parameter_servers[0].recoveries)
        lost, back = taken(scheduler, received)
    assert (lost.kind, lost.task) == ("parameter_server_lost", "ps 0")
    assert (back.kind, back.task, back.name, back.count) == ("parameter_server_recovered", "ps 0", "ckpt-3", 9)


def test_a_loss_without_recovery_is_one_event() -> None:
    runtime, received = FakeRuntime(1), []
    with running_scheduler(runtime) as scheduler:
        scheduler.listeners.on_event(received.append)
        runtime.lose_parameter_server()
        for _ in range(2):
            scheduler.schedule(index_of, "step")
            with pytest.raises(ParameterServerLost):
                scheduler.join(LIMIT)
        kinds = [event.kind for event in taken(scheduler, received)]
    assert kinds.count("parameter_server_lost") == 1
