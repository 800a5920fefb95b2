"""Tests of events: the ring that has them, callbacks for them, the log as JSON, and which ones a cluster records."""

import dataclasses
import gc
import json
import logging
import pathlib
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import pytest

from coordinator.errors import ParameterServerLost, Rollback, StrategyClosedError
from coordinator.events.event_stream import Event, EventStream, Kind, log_event, log_written_as
from coordinator.events.trace import Listeners
from coordinator.testing.fake_runtime import FakeRuntime
from coordinator.workers.scheduler import Scheduler
from tests import ROOT
from tests.deadline import LIMIT, wait_until
from tests.events.test_trace import Viewer
from tests.fake_cluster import OPTIONS, check_events, fail, hold, index_of, running_scheduler


def test_the_page_lists_every_kind() -> None:
    page = (ROOT / "docs/events.md").read_text(encoding="utf-8").partition("\n## Kinds\n")[2]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [*get_args(Kind)]


def test_a_reader_gets_each_event_once_in_order() -> None:
    stream = EventStream()
    stream.record("worker_joined", "worker 0", detail="host:1")
    stream.record("closures_finished", "worker 0", "step", 3, 0.5)
    found, following, dropped = stream.since(0)
    assert [(event.kind, event.count, event.seconds) for event in found] == [
        ("worker_joined", 1, 0.0),
        ("closures_finished", 3, 0.5),
    ]
    assert found[0] == Event(found[0].time, "worker_joined", "worker 0", detail="host:1")
    assert (following, dropped) == (2, 0)
    assert stream.since(following) == ([], 2, 0)
    stream.record("worker_left", "worker 0")
    assert [event.kind for event in stream.since(following)[0]] == ["worker_left"]


def test_a_slow_reader_gets_the_latest_events_and_the_number_of_those_dropped() -> None:
    stream = EventStream(capacity=3)
    for number in range(10):
        stream.record("closures_started", name=str(number))
    found, following, dropped = stream.since(2)
    assert [event.name for event in found] == ["7", "8", "9"]
    assert (following, dropped) == (10, 5)
    assert stream.recorded == 10


@pytest.mark.usefixtures("frequent_thread_switches")
def test_no_event_is_lost_between_threads_that_record_and_one_that_reads() -> None:
    stream, seen, following = EventStream(), 0, 0
    with ThreadPoolExecutor(4) as pool:
        recording = [pool.submit(lambda: [stream.record("closures_started") for _ in range(500)]) for _ in range(4)]
        while not all(future.done() for future in recording):
            found, following, dropped = stream.since(following)
            seen += len(found)
            assert dropped == 0
    assert seen + len(stream.since(following)[0]) == stream.recorded == 2000


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
        with pytest.raises(ZeroDivisionError):
            scheduler.join(LIMIT)
        *_, failed = taken(scheduler, received)
        assert (failed.kind, failed.name, failed.detail) == ("closures_failed", "broken", "ZeroDivisionError")
        hold(scheduler, name="at the end")
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
        _, [future] = hold(scheduler, name="deadly", worker=1)
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


def test_a_recovery_is_an_event_and_in_the_trace_with_the_steps_that_are_lost(tmp_path: pathlib.Path) -> None:
    runtime, received, path = FakeRuntime(2), [], tmp_path / "trace.json"

    def recover() -> Rollback:
        runtime.restore_parameter_server()
        servers = ("/job:ps/task:0",)
        return Rollback(parameter_servers=servers, checkpoint="ckpt-3", step_before=30, step_after=21, seconds=0.1)

    with running_scheduler(runtime) as scheduler:
        trace = scheduler.trace(path)
        scheduler.recovery.recover_with(recover)
        scheduler.listeners.on_event(received.append)
        scheduler.queue.events.record("checkpoint_saved", name="ckpt-3", seconds=0.25)
        gate, [future] = hold(scheduler, name="interrupted", worker=1)
        runtime.lose_parameter_server()
        gate.open()
        future.result(LIMIT)
        by_kind = {event.kind: event for event in taken(scheduler, received)}
        for _ in range(2):
            trace.close()
    assert by_kind["parameter_server_lost"].task == "ps 0"
    back = by_kind["parameter_server_recovered"]
    assert (back.task, back.name, back.count) == ("ps 0", "ckpt-3", 9)
    viewer = Viewer(path)
    (recovery,) = viewer.slices("ps 0")
    assert (recovery["name"], recovery["args"]["steps lost"], recovery["args"]["checkpoint"]) == ("lost", 9, "ckpt-3")
    (saved,) = viewer.slices("checkpoints")
    assert (saved["name"], saved["dur"]) == ("checkpoint saved", 250_000)
    *_, call = [each for each in viewer.slices("worker 1") if each["name"] == "interrupted"]
    assert call["args"]["outcome"] == "finished"


def test_a_loss_without_recovery_is_one_event() -> None:
    runtime = FakeRuntime(1)
    with running_scheduler(runtime) as scheduler:
        runtime.lose_parameter_server()
        for _ in range(2):
            scheduler.schedule(index_of, "step")
            with pytest.raises(ParameterServerLost):
                scheduler.join(LIMIT)
        kinds = [event.kind for event in scheduler.queue.events.since(0)[0]]
    assert kinds.count("parameter_server_lost") == 1


LOGGER = logging.getLogger("coordinator")


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_what_is_logged_and_rare_events_are_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with log_written_as("json"):
        LOGGER.warning("%s was lost", "worker 1")
        LOGGER.info("below the level of the logger")
        log_event(Event(86400.25, "worker_lost", "worker 1", detail="refused"))
        log_event(Event(86400.5, "closures_finished", "worker 1", "step"))
        try:
            raise ValueError("broken")
        except ValueError:
            LOGGER.exception("It failed.")
    LOGGER.warning("text again")
    logged, event, failed = lines(capsys)
    assert (logged["level"], logged["message"]) == ("WARNING", "worker 1 was lost")
    assert (event["kind"], event["task"], event["detail"]) == ("worker_lost", "worker 1", "refused")
    assert event["time"] == "1970-01-02T00:00:00.250+00:00"
    assert failed["exception"].endswith("ValueError: broken")


def test_the_option_has_the_events_of_a_cluster_logged(capsys: pytest.CaptureFixture[str]) -> None:
    options = dataclasses.replace(OPTIONS, log_format="json")
    with log_written_as("json"), running_scheduler(FakeRuntime(1), options) as scheduler:
        index = scheduler.cluster.add_worker("new:1")
        scheduler.schedule(index_of, "step").result(LIMIT)
        scheduler.cluster.remove_worker(index)
    kinds = [line["kind"] for line in lines(capsys) if "kind" in line]
    assert kinds[0] == "worker_joined"
    assert kinds[-1] == "worker_left"
    assert "closures_finished" not in kinds
