"""The metrics for Prometheus: their format, their values, and the linter that comes with it."""

import shutil
import subprocess

import pytest

from coordinator.dashboard.metrics import metrics_of
from coordinator.dashboard.snapshot import Snapshot
from tests.dashboard.made_cluster import MadeCluster


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
