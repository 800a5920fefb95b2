"""Tests of callbacks for events, and of the events that a cluster records."""

import dataclasses
import gc
import queue
import threading
import weakref

import pytest

from coordinator.errors import ParameterServerLost, Rollback, StrategyClosedError
from coordinator.events.event_stream import Event, EventStream
from coordinator.events.trace import Listeners
from coordinator.testing.fake_runtime import FakeRuntime, Gate
from tests.deadline import LIMIT
from tests.fake_cluster import OPTIONS, check_events, index_of, running_scheduler


def until(received: "queue.Queue[Event]", kind: str) -> list[Event]:
    """Takes events up to the next one of a kind."""
    found = [received.get(timeout=LIMIT)]
    while found[-1].kind != kind:
        found.append(received.get(timeout=LIMIT))
    return found


def fail(_: int) -> None:
    raise ValueError("no")


def test_a_callback_gets_the_events_from_its_registration_to_the_end() -> None:
    received: queue.Queue[Event] = queue.Queue()
    with running_scheduler(FakeRuntime(1)) as scheduler:
        scheduler.schedule(index_of, "before").result(LIMIT)
        scheduler.listeners.on_event(received.put)
        scheduler.schedule(index_of, "step").result(LIMIT)
        started, finished = until(received, "closures_finished")
        assert (started.kind, started.task, started.name) == ("closures_started", "worker 0", "step")
        assert (finished.task, finished.name, finished.count) == ("worker 0", "step", 1)
        assert finished.seconds >= 0
        assert started.time <= finished.time
        scheduler.schedule(fail, "broken").exception(LIMIT)
        with pytest.raises(ValueError, match="no"):
            scheduler.join(LIMIT)
        gate = Gate(scheduler.servers)
        scheduler.schedule(gate, "at the end")
        gate.wait_arrived()
    failed, *rest = until(received, "closures_failed")[1:]
    assert (failed.name, failed.detail, rest) == ("broken", "ValueError", [])
    assert until(received, "closures_cancelled")[-1].name == "at the end", "close passes on the last events"


def test_a_callback_that_is_stopped_is_not_kept() -> None:
    class Callback:
        def __call__(self, event: Event) -> None: ...

    callback = Callback()
    kept = weakref.ref(callback)
    listeners = Listeners(EventStream(), LIMIT)
    stop = listeners.on_event(callback)
    stop()
    stop()
    del callback, stop
    gc.collect()
    assert kept() is None
    listeners.close()


def test_a_callback_that_raises_is_logged_and_called_again(caplog: pytest.LogCaptureFixture) -> None:
    stream, received = EventStream(), queue.Queue()
    listeners = Listeners(stream, LIMIT)

    def take(event: Event) -> None:
        received.put(event.name)
        if event.name == "bad":
            raise ValueError("refused")

    stop = listeners.on_event(take)
    for name in ("bad", "good"):
        stream.record("rule_changed", name=name)
    stop()
    stream.record("rule_changed", name="after the end")
    listeners.close()
    assert [received.get_nowait() for _ in range(received.qsize())] == ["bad", "good"]
    assert "for events raised an error; training continues" in caplog.text
    with pytest.raises(StrategyClosedError, match="the strategy is closed"):
        listeners.on_event(take)
    with pytest.raises(TypeError, match="takes a function"):
        listeners.on_event(None)


def test_a_callback_that_does_not_return_is_abandoned_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    stream, entered, may_return = EventStream(), threading.Event(), threading.Event()
    listeners = Listeners(stream, close_timeout=0.01)
    listeners.on_event(lambda _: (entered.set(), may_return.wait(LIMIT)))
    stream.record("rule_changed")
    assert entered.wait(LIMIT)
    listeners.close()
    assert "A callback for events has not returned for 0.01 s; its thread is left behind." in caplog.text
    may_return.set()


def test_a_callback_may_close_what_calls_it() -> None:
    stream, closed = EventStream(), threading.Event()
    listeners = Listeners(stream, LIMIT)
    listeners.on_event(lambda _: (listeners.close(), closed.set()))
    stream.record("rule_changed")
    assert closed.wait(LIMIT)


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
    runtime, received = FakeRuntime(2), queue.Queue()
    with running_scheduler(runtime, dataclasses.replace(OPTIONS, max_attempts=1)) as scheduler:
        scheduler.listeners.on_event(received.put)
        gate = Gate(runtime)
        future = scheduler.schedule(gate, "deadly", worker=1)
        gate.wait_arrived()
        runtime.kill(1)
        assert future.exception(LIMIT) is not None
        quarantined = until(received, "function_quarantined")[-1]
        assert (quarantined.task, quarantined.name) == ("worker 1", "deadly")
        assert until(received, "worker_lost")[-1].task == "worker 1"
        runtime.restart(1)
        assert until(received, "worker_returned")[-1].task == "worker 1"
        index = scheduler.cluster.add_worker("new:1")
        scheduler.cluster.remove_worker(index)
        joined, *_, left = until(received, "worker_left")
        assert (joined.kind, joined.task, joined.detail, left.task) == (
            "worker_joined",
            "worker 2",
            "new:1",
            "worker 2",
        )
    check_events(scheduler)


def test_a_recovery_is_an_event_with_the_steps_that_are_lost() -> None:
    runtime, received = FakeRuntime(1), queue.Queue()

    def recover() -> Rollback:
        runtime.restore_parameter_server()
        return Rollback(
            parameter_servers=("/job:ps/task:0",), checkpoint="ckpt-3", step_before=30, step_after=21, seconds=0.1
        )

    with running_scheduler(runtime) as scheduler:
        scheduler.recovery.recover_with(recover)
        scheduler.listeners.on_event(received.put)
        runtime.lose_parameter_server()
        lost = until(received, "parameter_server_lost")[-1]
        back = until(received, "parameter_server_recovered")[-1]
    assert lost.task == back.task == "ps 0"
    assert (back.name, back.count) == ("ckpt-3", 9)


def test_a_loss_without_recovery_is_one_event() -> None:
    runtime, received = FakeRuntime(1), queue.Queue()
    with running_scheduler(runtime) as scheduler:
        scheduler.listeners.on_event(received.put)
        runtime.lose_parameter_server()
        scheduler.schedule(index_of, "step")
        with pytest.raises(ParameterServerLost):
            scheduler.join(LIMIT)
        scheduler.schedule(index_of, "step")
        with pytest.raises(ParameterServerLost):
            scheduler.join(LIMIT)
    kinds = [received.get().kind for _ in range(received.qsize())]
    assert kinds.count("parameter_server_lost") == 1


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
def test_a_callback_gets_all_events_although_it_raises(error: type[BaseException]) -> None:
    received: queue.Queue[Event] = queue.Queue()

    def fail(event: Event) -> None:
        received.put(event)
        raise error

    stream = EventStream()
    listeners = Listeners(stream, LIMIT)
    listeners.on_event(fail)
    for _ in range(2):
        stream.record("worker_joined")
        stream.record("worker_left")
        until(received, "worker_left")
    listeners.close()
