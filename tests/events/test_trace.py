"""Tests of traces, read as a viewer reads them."""

import json
import pathlib
import threading
from collections.abc import Iterable

import pytest

from coordinator.errors import StrategyClosedError
from coordinator.events.event_stream import EventStream
from coordinator.events.trace import Trace, TraceFile
from coordinator.testing.fake_runtime import FakeRuntime
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import index_of, running_scheduler


class Viewer:
    """What a trace shows."""

    def __init__(self, path: pathlib.Path) -> None:
        self.events = json.loads(path.read_text(), parse_constant=pytest.fail)["traceEvents"]
        self._tracks = {each["tid"]: each["args"]["name"] for each in self.events if each["name"] == "thread_name"}

    def slices(self, track: str) -> list[dict]:
        return [each for each in self.events if each["ph"] == "X" and self._tracks[each["tid"]] == track]

    def instants(self, track: str) -> list[str]:
        marks = [each for each in self.events if each["ph"] == "i" and each["s"] == "t"]
        return [each["name"] for each in marks if self._tracks[each["tid"]] == track]

    def counters(self) -> dict[str, dict]:
        return {each["name"]: each["args"] for each in self.events if each["ph"] == "C"}


def names(slices: Iterable[dict]) -> list[str]:
    return [each["name"] for each in slices]


def test_a_trace_shows_each_call_with_an_arrow_from_its_schedule_to_its_result(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.json"
    with running_scheduler(FakeRuntime(2)) as scheduler, scheduler.trace(path):
        for _ in range(3):
            scheduler.schedule(index_of, "step", worker=1)
        scheduler.join(LIMIT)
    viewer = Viewer(path)
    calls = viewer.slices("worker 1")
    assert names(calls) == ["step"] * 3
    assert viewer.instants("ps 0") == viewer.instants("worker 0") == ["the trace begins"]
    for call in calls:
        flow = [each for each in viewer.events if each.get("bind_id") == call["bind_id"]]
        schedule, _, result = sorted(flow, key=lambda each: (each["ts"], not each.get("flow_out")))
        assert (schedule["name"], result["name"]) == ("schedule step", "finished: step")
        assert schedule["ts"] <= call["ts"] <= result["ts"]
        assert call["args"]["outcome"] == "finished"
    assert viewer.counters()["closures"] == {"waiting": 0, "running": 0}


def test_what_still_runs_and_what_is_lost_at_the_end_is_shown(tmp_path: pathlib.Path) -> None:
    events, path = EventStream(), tmp_path / "trace.json"
    with Trace(events, path, [], lambda: (0, 0), dict, LIMIT):
        events.record("closures_started", "worker 0", "step", 2)
        events.record("worker_lost", "worker 1", detail="refused")
    viewer = Viewer(path)
    assert names(viewer.slices("worker 0")) == ["step"]
    assert [each["args"] for each in viewer.slices("worker 1")] == [{"detail": "refused"}]


def test_servers_that_do_not_answer_hold_up_no_event(tmp_path: pathlib.Path) -> None:
    events, path = EventStream(), tmp_path / "trace.json"
    asked, answer = threading.Event(), threading.Event()

    def busy() -> dict[str, float]:
        asked.set()
        assert answer.wait(LIMIT)
        return {"ps 0": 0.5}

    with Trace(events, path, [], lambda: (0, 0), busy, LIMIT):
        assert asked.wait(LIMIT)
        events.record("worker_joined")
        wait_until(lambda: "closures" in path.read_text())
        answer.set()
        wait_until(
            lambda: events.record("value_reported", name="loss", detail="0.5") or "busy" in Viewer(path).counters()
        )
    assert Viewer(path).counters()["busy"] == {"ps 0": 0.5}


def test_a_reported_value_that_is_no_number_leaves_the_file_readable(tmp_path: pathlib.Path) -> None:
    events, path = EventStream(), tmp_path / "trace.json"
    with Trace(events, path, [], lambda: (0, 0), dict, LIMIT):
        for value in ("0.5", "nan", "inf"):
            events.record("value_reported", name="loss", detail=value)
    assert "NaN" not in path.read_text()
    assert Viewer(path).counters()["loss"] == {"loss": 0.5}


def test_the_file_is_complete_while_it_is_written(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(path, "training", 1)
    for number in range(3):
        file.slice("worker 0", f"step {number}", number, 0.5)
        file.flush()
        assert names(Viewer(path).slices("worker 0")) == [f"step {each}" for each in range(number + 1)]
    file.close()


def test_a_trace_that_cannot_be_written_is_an_error_at_once(tmp_path: pathlib.Path) -> None:
    with running_scheduler(FakeRuntime(1)) as scheduler:
        with pytest.raises(FileNotFoundError):
            scheduler.trace(tmp_path / "no folder" / "trace.json")
        with pytest.raises(ValueError, match="A trace must be on a local file system"):
            scheduler.trace("gs://bucket/trace.json")
        scheduler.schedule(index_of, "step").result(LIMIT)
    with pytest.raises(StrategyClosedError, match="trace would see nothing"):
        scheduler.trace(tmp_path / "trace.json")


def test_a_trace_that_cannot_be_written_any_more_ends_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    events = EventStream()
    with Trace(events, "/dev/full", [], lambda: (0, 0), dict, LIMIT):
        events.record("closures_started", "worker 0", "step")
    assert "The trace /dev/full ends here" in caplog.text
