"""A cluster of any size that runs in no time: its events and counts, as the dashboard gets them."""

import dataclasses
import random
from collections.abc import Sequence

from coordinator.dashboard.aggregator import Aggregator
from coordinator.dashboard.snapshot import RuleRow, ServerUsage, Snapshot
from coordinator.events.event_stream import Event
from coordinator.statistics import ClusterStatistics, WorkerStatistics

STARTED = 1_800_000_000.0


class MadeCluster:
    """Feeds an aggregator second by second."""

    def __init__(self, workers: int, started: float = STARTED) -> None:
        self.now = started
        self.aggregator = Aggregator(started, "train.py")
        self._random = random.Random(5)
        self._workers = [
            WorkerStatistics(index, f"/job:worker/replica:0/task:{index}", "live") for index in range(workers)
        ]
        self._servers = [ServerUsage(f"ps {index}") for index in range(1 + workers // 64)]
        self._free_at = [started] * workers
        self._names = [""] * workers
        self._loss = 2.3
        self._event("worker_joined", f"worker {workers - 1}")

    def run(self, seconds: int, away: Sequence[int] = ()) -> Snapshot:
        """Lets time pass, in which some workers are lost; returns the last snapshot."""
        for index in away:
            self._names[index] = ""
            self._change(index, state="lost", losses=self._workers[index].losses + 1)
            self._event("worker_lost", f"worker {index}", detail="Connection reset by peer")
        for _ in range(seconds):
            snapshot = self._second(away)
        for index in away:
            self._change(index, state="live", reconnections=self._workers[index].reconnections + 1)
            self._event("worker_returned", f"worker {index}", seconds=float(seconds))
        return snapshot

    def checkpoint(self) -> None:
        """Saves one."""
        self._event("checkpoint_saved", name="/checkpoints/run/ckpt-12", seconds=1.4)

    def fail(self, worker: int) -> None:
        """Has a closure fail."""
        self._event("closures_failed", f"worker {worker}", "train_step", detail="InvalidArgumentError: shapes")
        self._change(worker, failed=self._workers[worker].failed + 1)

    def _second(self, away: Sequence[int]) -> Snapshot:
        end = self.now + 1.0
        for index in set(range(len(self._workers))) - set(away):
            self._run_worker(index, end)
        self.now = end
        self._loss = 0.2 + (self._loss - 0.2) * 0.985 + self._random.uniform(-0.01, 0.01)
        self._event("value_reported", name="loss", detail=str(self._loss))
        self._event("value_reported", name="accuracy", detail=str(1 - self._loss / 2.6))
        self._use_servers()
        workers = tuple(self._workers)
        statistics = ClusterStatistics(
            waiting=1200,
            running=8 * (len(workers) - len(away)),
            finished=sum(worker.finished for worker in workers),
            failed=sum(worker.failed for worker in workers),
            cancelled=0,
            retried=sum(worker.losses for worker in workers),
            workers=workers,
        )
        return self.aggregator.snapshot(self.now, statistics, [self._rule(statistics)])

    def _run_worker(self, index: int, end: float) -> None:
        slowness = 2.5 if index % 7 == 3 else 1.0
        while self._free_at[index] < end:
            task = f"worker {index}"
            if self._names[index]:
                self._event("closures_finished", task, self._names[index], 8, at=self._free_at[index])
                self._change(index, finished=self._workers[index].finished + 8)
            begin = max(self._free_at[index], end - 1.0) + self._random.choice([0.0, 0.01, 0.2])
            self._names[index] = self._random.choice(["train_step"] * 40 + ["evaluate_shard"])
            self._event("closures_started", task, self._names[index], 8, at=begin)
            self._free_at[index] = begin + slowness * self._random.uniform(0.2, 0.5)

    def _use_servers(self) -> None:
        self._servers = [
            dataclasses.replace(
                server,
                time=self.now,
                memory=912_000_000 + 7_000_000 * index,
                cpu=server.cpu + self._random.uniform(0.5, 0.7),
                received=server.received + self._random.randrange(60_000_000, 80_000_000),
                sent=server.sent + self._random.randrange(70_000_000, 90_000_000),
            )
            for index, server in enumerate(self._servers)
        ]
        self.aggregator.add_usage(self._servers)

    def _rule(self, statistics: ClusterStatistics) -> RuleRow:
        workers = len(self._workers)
        shape = [2.0 ** -abs(staleness - workers + 1) for staleness in range(2 * workers)]
        counts = [int(statistics.finished * share / sum(shape)) for share in shape]
        return RuleRow(
            number=0,
            name="BoundedDelay",
            updates=sum(counts) * 19 // 20,
            pushes=sum(counts),
            rejected=sum(counts) // 20,
            bytes_pulled=statistics.finished * 400_000,
            bytes_pushed=statistics.finished * 400_000,
            mean=float(workers - 1),
            p99=2 * workers,
            histogram=tuple(counts),
            waited=dict.fromkeys(range(workers), 0.04),
        )

    def _change(self, index: int, **changes: object) -> None:
        self._workers[index] = dataclasses.replace(self._workers[index], **changes)

    def _event(
        self, kind: str, task: str = "", name: str = "", count: int = 1, *, at: float = 0.0, **rest: float | str
    ) -> None:
        self.aggregator.add([Event(at or self.now, kind, task, name, count, **rest)], 0, self.now)
