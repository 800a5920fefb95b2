"""Tests that snapshots of statistics have a readable text."""

import dataclasses

from coordinator.statistics import ClusterStatistics, ParameterServerStatistics, WorkerStatistics

COUNTS = ClusterStatistics(waiting=1, running=2, finished=3, failed=4, cancelled=5, retried=6)


def test_a_snapshot_names_the_unavailable_servers() -> None:
    workers = tuple(
        WorkerStatistics(index, f"/job:worker/task:{index}", state)
        for index, state in enumerate(["live", "lost", "lost"])
    )
    servers = (ParameterServerStatistics(0, "/job:ps/task:0", "lost"),)
    text = str(dataclasses.replace(COUNTS, workers=workers, parameter_servers=servers))
    assert text.endswith("; 3 workers; lost: /job:worker/task:1, /job:worker/task:2, /job:ps/task:0")
