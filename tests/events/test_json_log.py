"""Tests of the log as JSON."""

import dataclasses
import json
import logging

import pytest

from coordinator.events.event_stream import Event, log_event, log_written_as
from coordinator.testing.fake_runtime import FakeRuntime
from tests.deadline import LIMIT
from tests.fake_cluster import OPTIONS, index_of, running_scheduler

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
