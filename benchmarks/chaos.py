"""A soak: trains for minutes while servers are killed, restarted and frozen at random, and checks what came of it.

    python -m benchmarks.chaos --minutes 10 --seed 3

It prints the faults by kind, what became of the closures, the longest pause of a worker that nothing had befallen, and
whether the count that every step adds to is what at-least-once allows: after the last checkpoint that was restored, at
least once for each step that finished since, and at most once more for each attempt that was handed back or cancelled.
It ends with code 1 if that does not hold, or if something did not finish.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence

import tensorflow as tf

import coordinator
from benchmarks.unaffected_pause import longest_pause
from coordinator.testing import Chaos, LocalCluster

DEADLINE = 300.0
# Steps that are scheduled ahead: enough for the time that a checkpoint takes.
AHEAD = 400
SAVE_EVERY = 5.0


@dataclasses.dataclass(frozen=True)
class Restored:
    """Where a recovery left the counts.

    Attributes:
      counts: what the restored checkpoint held of each; they differ by the steps that ran while it was written.
      finished: how many steps had finished by then.
    """

    counts: Sequence[int]
    finished: int


class Training:
    """Steps that read their worker's iterator and count on every parameter server, and checkpoints of the counts."""

    def __init__(self, strategy: coordinator.ParameterServerStrategy, folder: pathlib.Path) -> None:
        self._strategy = strategy
        self._finished_at: list[tuple[float, int]] = []
        self._futures: list[coordinator.Future] = []
        self.restored = Restored([0] * len(strategy.parameter_servers), 0)
        with strategy.scope():
            self._counts = counts = [tf.Variable(0, dtype=tf.int64) for _ in strategy.parameter_servers]
        dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(1, 2).repeat())
        self._iterator = iter(dataset)
        checkpoint = tf.train.Checkpoint(**{f"count{index}": count for index, count in enumerate(counts)})
        self._saves = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=3)
        self._saves.save()
        strategy.restore_from(self._saves, on_rollback=self._note_rollback)

        @tf.function
        def step(iterator: tf.data.Iterator) -> tf.Tensor:
            one = next(iterator)
            for count in counts:
                count.assign_add(one)
            return coordinator.get_current_worker_index()

        self._step = step

    def run(self, seconds: float) -> None:
        """Schedules and saves for so long, never far ahead of the workers, then waits for the last step."""
        until = time.monotonic() + seconds
        save_at = time.monotonic() + SAVE_EVERY
        while time.monotonic() < until:
            future = self._strategy.schedule(self._step, args=(self._iterator,))
            future.add_done_callback(self._note_finished)
            self._futures.append(future)
            if len(self._futures) > AHEAD:
                self._futures[-AHEAD].exception(DEADLINE)
            if time.monotonic() > save_at:
                self._saves.save()
                save_at = time.monotonic() + SAVE_EVERY
        self._strategy.join(DEADLINE)

    @property
    def finished_at(self) -> Sequence[tuple[float, int]]:
        """When each step finished, on the `time.monotonic` clock, and on which worker."""
        return sorted(self._finished_at)

    @property
    def scheduled(self) -> int:
        """How many steps were scheduled."""
        return len(self._futures)

    @property
    def failed(self) -> int:
        """How many of them have no result."""
        return sum(future.exception(0) is not None for future in self._futures)

    def counts(self) -> list[int]:
        """How often each parameter server was counted on."""
        return [int(count.numpy()) for count in self._counts]

    def _note_finished(self, future: coordinator.Future) -> None:
        if not future.cancelled() and future.exception(0) is None:
            self._finished_at.append((time.monotonic(), int(future.result(0))))

    def _note_rollback(self, _: coordinator.RolledBack) -> None:
        self.restored = Restored(self.counts(), len(self._finished_at))


def soak(minutes: float, seed: int, workers: int, ps: int, jobs: Sequence[str]) -> dict[str, object]:
    """Trains under chaos; what came of it."""
    options = coordinator.Options(heartbeat_timeout=3.0, max_attempts=1000, parameter_server_timeout=DEADLINE)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(workers, ps) as cluster,
        coordinator.ParameterServerStrategy(cluster.resolver, options=options) as strategy,
    ):
        training = Training(strategy, pathlib.Path(folder))
        with Chaos(cluster, seed=seed, jobs=jobs) as chaos:
            training.run(60 * minutes)
        statistics = strategy.cluster.statistics()
        restored, counts = training.restored, training.counts()
        least = [count + len(training.finished_at) - restored.finished for count in restored.counts]
        most = [count + statistics.retried + workers for count in least]
        return {
            "seed": seed,
            "minutes": minutes,
            "faults": dict(Counter(f"{fault.kind} {fault.job}" for fault in chaos.faults)),
            "scheduled": training.scheduled,
            "finished": training.scheduled - training.failed,
            "retried": statistics.retried,
            "counts": counts,
            "least": least,
            "most": most,
            "longest pause of an unaffected worker (s)": round(
                longest_pause(training.finished_at, chaos.faults, chaos.started_at, range(workers)), 3
            ),
            "threads": threading.active_count(),
            "holds": training.failed == 0
            and all(low <= count <= high for low, count, high in zip(least, counts, most, strict=True)),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the soak and prints what came of it; 0 if all of it holds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument("--spare-ps", action="store_true", help="hurt workers alone")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    jobs = ("worker",) if chosen.spare_ps else ("worker", "ps")
    found = soak(chosen.minutes, chosen.seed, chosen.workers, chosen.ps, jobs)
    if chosen.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:45} {value}")
    return 0 if found["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
