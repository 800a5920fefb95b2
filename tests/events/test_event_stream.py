"""Tests of the ring of events."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import pytest

from coordinator.events.event_stream import Event, EventStream, Kind, task_of_device
from tests import ROOT


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


def test_the_task_of_a_device_is_its_job_and_index() -> None:
    devices = ("/job:ps/replica:0/task:1", "/job:worker/task:12", "/job:ps", "something")
    assert [task_of_device(device) for device in devices] == ["ps 1", "worker 12", "ps", "something"]
