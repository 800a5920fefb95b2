"""What the dashboard shows and exports, computed from events and counts in no time."""

import dataclasses
import json
import math
import shutil
import subprocess

import pytest

from coordinator.dashboard.aggregator import Aggregator
from coordinator.dashboard.dashboard import state_of, target_of
from coordinator.dashboard.metrics import metrics_of
from coordinator.dashboard.scale_advice import Load, Resource, expected_rates, scale_advice
from coordinator.dashboard.snapshot import ServerUsage, Snapshot, UsageRecord
from coordinator.events.event_stream import Event
from coordinator.statistics import ClusterStatistics, WorkerStatistics
from tests.dashboard.made_cluster import MadeCluster


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
    # The idle share counts the call that still runs.
    aggregator = Aggregator(0.0, "train.py")
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


def test_the_history_of_a_long_run_is_short_and_begins_at_its_beginning(aggregator: Aggregator) -> None:
    for second in range(1, 1501):
        aggregator.add([Event(second - 0.5, "value_reported", name="loss", detail="0.5")], 0, second - 0.1)
        history = aggregator.snapshot(float(second), statistics(3 * second)).history
    assert 300 <= len(history.times) == len(history.rates) == len(history.values["loss"]) <= 600
    assert history.times[0] < 20.0
    assert history.times[-1] > 1490.0
    assert (set(history.rates), set(history.values["loss"])) == ({3.0}, {0.5})


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


BEGIN = ServerUsage(
    "ps 0", 10.0, cpu=5.0, processors=2.0, machine="1f", host="a", machine_cpu=100.0, machine_processors=4
)


def test_shares_are_of_the_processors_of_the_task_and_of_its_host() -> None:
    record = UsageRecord()
    # Tasks on one host share its processors, and another host has others.
    first = [BEGIN, dataclasses.replace(BEGIN, task="client", processors=1.0)]
    first.append(dataclasses.replace(BEGIN, task="ps 1", machine="2e", host="b"))
    record.add(first)
    assert record.resources() == ()
    record.add([dataclasses.replace(each, time=12.0, cpu=6.0, machine_cpu=108.0) for each in first[1:]])
    record.add([dataclasses.replace(BEGIN, time=12.0, cpu=7.0, machine_cpu=104.0)])
    assert {resource.name: resource.share for resource in record.resources()} == {
        "parameter server 0": 0.5,
        "the client": 0.5,
        "parameter server 1": 0.25,
        "the processors of host a": 0.5,
        "the processors of host b": 1.0,
    }


def test_shares_are_of_the_window_and_the_rows_of_the_page_of_the_latest_two() -> None:
    record = UsageRecord(10.0)
    for second in range(0, 31, 2):
        # One processor for 20 s, then two.
        cpu = 5.0 + second + max(0, second - 20)
        record.add([dataclasses.replace(BEGIN, time=10.0 + second, cpu=cpu, machine_cpu=100.0 + 4 * second)])
    assert record.period() == (30.0, 40.0)
    assert record.resources()[0].share == pytest.approx(1.0)
    ((latest, before),) = record.pairs()
    assert (latest.time, before.time) == (40.0, 38.0)


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    cluster = MadeCluster(3)
    cluster.run(5)
    cluster.checkpoint()
    cluster.fail(1)
    return cluster.run(5, away=[2])


def test_each_metric_has_its_help_its_type_and_one_line_for_each_label(snapshot: Snapshot) -> None:
    lines = metrics_of(snapshot).splitlines()
    assert f"coordinator_closures_finished_total {snapshot.finished}" in lines
    assert 'coordinator_worker_up{worker="2"} 0' in lines
    assert 'coordinator_worker_up{worker="1"} 1' in lines
    assert 'coordinator_events_total{kind="worker_lost"} 1' in lines
    assert f'coordinator_reported_value{{name="loss"}} {snapshot.values["loss"]!r}' in lines
    assert 'coordinator_parameter_server_resident_memory_bytes{task="ps 0"} 912000000' in lines
    names = [line.split()[2] for line in lines if line.startswith("# HELP")]
    assert names == [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names)) > 25
    strange = Snapshot(0.0, 0.0, "", values={'a"b\\c\n': 1.5})
    assert 'coordinator_reported_value{name="a\\"b\\\\c\\n"} 1.5\n' in metrics_of(strange)


def test_staleness_is_a_cumulative_histogram(snapshot: Snapshot) -> None:
    (rule,) = snapshot.rules
    name = 'coordinator_rule_staleness_updates_bucket{rule="BoundedDelay",number="0",le='
    found = [line.removeprefix(name) for line in metrics_of(snapshot).splitlines() if line.startswith(name)]
    buckets = [(edge.strip('"'), int(count)) for edge, count in (each.split("} ") for each in found)]
    assert [edge for edge, _ in buckets] == ["0", "1", "2", "4", "+Inf"]
    assert [count for _, count in buckets][:3] == [sum(rule.histogram[:size]) for size in (1, 2, 3)]
    assert buckets[-1][1] == rule.pushes


@pytest.mark.release
def test_the_linter_of_prometheus_finds_nothing(snapshot: Snapshot) -> None:
    promtool = shutil.which("promtool")
    assert promtool, "promtool is not installed: apt-get install prometheus"
    text = metrics_of(snapshot)
    lint = subprocess.run([promtool, "check", "metrics"], check=False, input=text, capture_output=True, text=True)
    assert (lint.returncode, lint.stdout + lint.stderr) == (0, "")


FREE = Resource("parameter server 0", 0.0)


def test_workers_that_share_nothing_add_up() -> None:
    assert expected_rates(Load(2, 20.0, [FREE]), 4) == pytest.approx([10.0, 20.0, 30.0, 40.0], rel=1e-4)
    advice = scale_advice(Load(4, 40.0, [FREE]))
    assert (advice.workers, advice.target) == (4, 16)
    assert advice.text == "2 more workers would bring 50%; parameter server 0 is the busiest (0%)."


def test_rates_are_those_of_the_machine_repair_model() -> None:
    # One server, exponential times: think 30 ms, service 10 ms, whose rate is known (Lazowska et al., chapter 6).
    def rate(workers: int) -> float:
        term, terms = 1.0, [1.0]
        for k in range(1, workers + 1):
            term *= (workers - k + 1) * 10.0 / 30.0
            terms.append(term)
        return (1 - 1 / sum(terms)) / 0.010

    load = Load(3, rate(3), [Resource("parameter server 0", 0.010 * rate(3))])
    assert expected_rates(load, 8) == pytest.approx([rate(workers) for workers in range(1, 9)], rel=1e-3)


def test_the_rate_is_at_most_what_the_processors_of_a_host_can_do() -> None:
    # Two workers make 45 steps per second, each of which takes 40 ms of two processors, 18 ms of them in the server.
    load = Load(2, 45.0, [Resource("the processors of host a", 0.9), Resource("parameter server 0", 0.405)])
    rates = expected_rates(load, 32)
    assert rates[1] == pytest.approx(45.0)
    assert max(rates) == pytest.approx(50.0)
    assert scale_advice(load).text.endswith("; the processors of host a are the bottleneck (90%).")


def test_a_program_that_schedules_too_little_is_told_so() -> None:
    advice = scale_advice(Load(4, 40.0, [FREE], idle=0.5, waiting=0))
    assert (advice.target, advice.bottleneck, advice.expected[8]) == (2, "the program", 40.0)
    assert advice.text.startswith("More workers would bring nothing: the workers are idle 50% of the time")
    # What waits could run on more workers, and a busy client cannot schedule more.
    assert scale_advice(Load(4, 40.0, [FREE], idle=0.5, waiting=3)).bottleneck == "parameter server 0"
    assert scale_advice(Load(4, 40.0, [Resource("the client", 0.9)], idle=0.5, waiting=0)).bottleneck == "the client"
