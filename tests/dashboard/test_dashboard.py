"""Tests of the end of a dashboard, and of what it does when its sources fail."""

import dataclasses
import json
import logging
import urllib.error
import urllib.request

import pytest

from coordinator.addresses import PageAddress
from coordinator.dashboard import dashboard as module
from coordinator.dashboard.dashboard import Dashboard
from coordinator.events.event_stream import EventStream
from coordinator.statistics import ClusterStatistics
from tests.deadline import wait_until

COUNTS = ClusterStatistics(waiting=0, running=0, finished=0, failed=0, cancelled=0, retried=0)


def test_the_page_ends_although_the_last_counts_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_INTERVAL_UNWATCHED", 1000.0)
    counts = [COUNTS]
    dashboard = Dashboard(PageAddress("127.0.0.1", 0), counts.pop, EventStream(), list, list)
    with pytest.raises(IndexError):
        dashboard.close()
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(dashboard.url, timeout=10)


def test_the_page_goes_on_after_counts_that_could_not_be_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_INTERVAL", 0.01)
    monkeypatch.setattr(module, "_INTERVAL_UNWATCHED", 0.01)
    read: list[int] = []

    def statistics() -> ClusterStatistics:
        read.append(1)
        if 1 < len(read) < 5:
            raise ValueError("not now")
        return dataclasses.replace(COUNTS, finished=len(read))

    def finished() -> int:
        with urllib.request.urlopen(dashboard.url + "api/state", timeout=30) as answer:
            return json.load(answer)["finished"]

    with caplog.at_level(logging.ERROR, logger="coordinator"):
        dashboard = Dashboard(PageAddress("127.0.0.1", 0), statistics, EventStream(), list, list)
        try:
            wait_until(lambda: finished() >= 5)
        finally:
            dashboard.close()
    assert [record.getMessage() for record in caplog.records] == [
        "The dashboard could not show what is new; it keeps trying."
    ]
