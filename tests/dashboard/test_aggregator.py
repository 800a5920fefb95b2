"""What the dashboard shows, computed from events and counts in no time."""

import json
import math

import pytest

from coordinator.dashboard.aggregator import Aggregator
from coordinator.dashboard.dashboard import state_of, target_of
from coordinator.dashboard.snapshot import ServerUsage, WorkerRow
from coordinator.events.event_stream import Event
from coordinator.statistics import ClusterStatistics, WorkerStatistics
from tests.dashboard.made_cluster import STARTED, MadeCluster


def statistics(*finished: int, state: str = "live") -> ClusterStatistics:
    workers = tuple(
        WorkerStatistics(index, f"/job:worker/replica:0/task:{index}", state, finished=count)
        for index, count in enumerate(finished)
    )
    return ClusterStatistics(3, 2, sum(finished), 0, 0, 0, workers)


@pytest.fixture
def aggregator() -> Aggregator:
    return Aggregator(0.0, "train.py")


def test_rates_are_means_of_the_last_ten_seconds(aggregator: Aggregator) -> None:
    for second in range(1, 31):
        snapshot = aggregator.snapshot(float(second), statistics(2 * second, 0 if second <= 20 else second - 20))
    first, second = snapshot.workers
    assert (snapshot.rate, snapshot.finished, snapshot.waiting) == (pytest.approx(3.0), 70, 3)
    assert (first.rate, first.share) == (pytest.approx(2.0), 1.0)
    assert (second.rate, second.share) == (pytest.approx(1.0), pytest.approx(0.5))


def test_what_a_worker_runs_is_shown_since_its_call_began(aggregator: Aggregator) -> None:
    aggregator.add([Event(2.5, "closures_started", "worker 0", "train_step", 8)], 0, 3.0)
    row = aggregator.snapshot(4.0, statistics(0)).workers[0]
    assert (row.function, row.calls, row.running_since) == ("train_step", 8, 2.5)
    aggregator.add([Event(4.5, "closures_finished", "worker 0", "train_step", 8)], 0, 4.5)
    row = aggregator.snapshot(5.0, statistics(8)).workers[0]
    assert (row.function, row.calls, row.running_since) == ("", 0, 0.0)


def test_the_idle_share_counts_the_call_that_still_runs(aggregator: Aggregator) -> None:
    aggregator.snapshot(0.0, statistics(0))
    aggregator.add([Event(6.0, "closures_started", "worker 0", "train_step")], 0, 6.0)
    assert aggregator.snapshot(8.0, statistics(0)).workers[0].idle == pytest.approx(0.75)


def test_the_stream_shows_how_a_call_ended_and_what_runs_and_forgets_after_a_minute(aggregator: Aggregator) -> None:
    events = [
        Event(1.0, "closures_started", "worker 0", "train_step"),
        Event(2.0, "worker_lost", "worker 0"),
        Event(3.0, "closures_started", "worker 1", "evaluate"),
    ]
    aggregator.add(events, 0, 3.0)
    stream = aggregator.snapshot(4.0, statistics(0, 0)).stream
    assert [(each.worker, each.outcome, each.start, each.end) for each in stream] == [
        (0, "lost", 1.0, 2.0),
        (1, "running", 3.0, 4.0),
    ]
    assert [each.worker for each in aggregator.snapshot(70.0, statistics(0, 0)).stream] == [1]


def test_the_timeline_has_what_happened_but_no_ordinary_closures(aggregator: Aggregator) -> None:
    events = [
        Event(1.0, "closures_finished", "worker 0", "train_step"),
        Event(2.0, "worker_lost", "worker 0", detail="Connection reset"),
        Event(3.0, "checkpoint_saved", name="/folder/ckpt-7", seconds=1.25),
        Event(4.0, "worker_returned", "worker 0", seconds=2.0),
    ]
    aggregator.add(events, 0, 4.0)
    snapshot = aggregator.snapshot(5.0, statistics(1))
    assert [(entry.level, entry.text) for entry in snapshot.timeline] == [
        ("error", "worker 0 was lost: Connection reset"),
        ("info", "Checkpoint ckpt-7 saved in 1.2 s"),
        ("good", "worker 0 is connected after 2.0 s"),
    ]
    assert (snapshot.checkpoint, snapshot.checkpoint_time) == ("/folder/ckpt-7", 3.0)


def test_one_failure_a_thousand_times_does_not_push_all_else_out_of_the_timeline(aggregator: Aggregator) -> None:
    failures = [Event(1.0 + call, "closures_failed", "worker 0", "step", detail="no") for call in range(1000)]
    aggregator.add([Event(0.5, "worker_joined", "worker 0"), *failures], 0, 1001.0)
    timeline = aggregator.snapshot(1002.0, statistics(0)).timeline
    assert [entry.kind for entry in timeline] == ["worker_joined", "closures_failed"]
    assert timeline[-1].time == 1000.0


def test_reported_values_have_a_history_of_means_and_no_nan(aggregator: Aggregator) -> None:
    for second in range(1, 4):
        events = [
            Event(second - 0.5, "value_reported", name="loss", detail=str(value))
            for value in ([1.0, 2.0, math.nan] if second != 2 else [])
        ]
        aggregator.add(events, 0, second - 0.1)
        snapshot = aggregator.snapshot(float(second), statistics(4 * second))
    assert snapshot.values == {"loss": 2.0}
    assert snapshot.history.times == (1.0, 2.0, 3.0)
    assert snapshot.history.rates == (4.0, 4.0, 4.0)
    assert snapshot.history.values == {"loss": (1.5, None, 1.5)}


def test_the_history_of_a_long_run_is_short_and_begins_at_its_beginning(
    aggregator: Aggregator,
) -> None:
    for second in range(1, 1501):
        aggregator.add([Event(second - 0.5, "value_reported", name="loss", detail="0.5")], 0, second - 0.1)
        snapshot = aggregator.snapshot(float(second), statistics(3 * second))
    history = snapshot.history
    assert 300 <= len(history.times) == len(history.rates) == len(history.values["loss"]) <= 600
    assert history.times[0] < 20.0
    assert history.times[-1] > 1490.0
    assert set(history.rates) == {3.0}
    assert set(history.values["loss"]) == {0.5}


def test_the_rates_of_a_server_are_those_since_it_was_asked_before(aggregator: Aggregator) -> None:
    aggregator.add_usage([ServerUsage("ps 0", 10.0, True, 100, cpu=1.0, received=1000, sent=0)])
    usage = ServerUsage("ps 0", 12.0, True, 200, cpu=4.0, received=3000, sent=500)
    for _ in range(2):
        aggregator.add_usage([usage])
    (row,) = aggregator.snapshot(13.0, statistics(0)).servers
    assert (row.usage, row.cores, row.receiving, row.sending) == (usage, 1.5, 1000.0, 250.0)
    aggregator.add_usage([ServerUsage("ps 0", 14.0, True, 50, cpu=0.1, received=4000, sent=600)])
    assert aggregator.snapshot(14.0, statistics(0)).servers[0].cores == 0.0


def test_a_state_leaves_out_the_segments_that_were_sent_before() -> None:
    snapshot = MadeCluster(4).run(30)
    whole, later = json.loads(state_of(snapshot)), json.loads(state_of(snapshot, STARTED + 29.0))
    assert len(whole["stream"]) > 40
    assert 4 <= len(later["stream"]) < 20
    assert all(segment[2] >= STARTED + 29.0 for segment in later["stream"])
    assert {**whole, "stream": 0} == {**later, "stream": 0}
    assert set(whole["workers"][0]) == set(WorkerRow.__dataclass_fields__)


def test_advice_comes_with_the_second_usage_and_is_a_sentence_of_the_state(aggregator: Aggregator) -> None:
    for second in range(1, 22, 2):
        aggregator.add([Event(float(second), "closures_started", "worker 0", "train_step")], 0, float(second))
        aggregator.add_usage([ServerUsage("ps 0", float(second), cpu=0.5 * second)])
        snapshot = aggregator.snapshot(float(second), statistics(5 * second))
        assert (snapshot.advice is None) == (second < 3)
    assert snapshot.advice is not None
    assert (snapshot.advice.bottleneck, snapshot.advice.busy) == ("parameter server 0", 0.5)
    assert json.loads(state_of(snapshot))["advice"] == snapshot.advice.text
    assert json.loads(target_of(snapshot))["expected"]["1"] == pytest.approx(5.0)
