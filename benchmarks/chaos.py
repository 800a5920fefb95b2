"""A soak test: trains for minutes while servers are killed, restarted and frozen at random, and checks the result.

    python -m benchmarks.chaos --minutes 10 --seed 3

It prints the faults by kind, the numbers of closures, the longest pause of a worker that no fault affected, and whether
the count that every step increments is what at-least-once allows: since the last restored checkpoint, at least once for
each finished step, and at most once more for each attempt that was requeued or cancelled. The exit code is 1 if that
does not hold, or if something did not finish.
"""

import argparse
import dataclasses
import itertools
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
from coordinator.testing import Chaos, LocalCluster
from coordinator.testing.chaos import Fault

DEADLINE = 300.0
# Steps that are scheduled ahead: enough for the time that a checkpoint takes.
AHEAD = 400
SAVE_EVERY = 5.0


@dataclasses.dataclass(frozen=True)
class Restored:
    """Where a recovery left the counts.

    Attributes:
      counts: what the restored checkpoint held of each; they differ by the steps that ran while it was written.
      finished: the number of steps that had finished by then.
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
        """Schedules and saves for `seconds`, at most `AHEAD` steps ahead, then waits for the last step."""
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
        """The number of scheduled steps."""
        return len(self._futures)

    @property
    def failed(self) -> int:
        """The number of steps without a result."""
        return sum(future.exception(0) is not None for future in self._futures)

    def counts(self) -> list[int]:
        """Returns the count on each parameter server."""
        return [int(count.numpy()) for count in self._counts]

    def _note_finished(self, future: coordinator.Future) -> None:
        if not future.cancelled() and future.exception(0) is None:
            self._finished_at.append((time.monotonic(), int(future.result(0))))

    def _note_rollback(self, _: coordinator.Rollback) -> None:
        self.restored = Restored(self.counts(), len(self._finished_at))


def soak(minutes: float, seed: int, workers: int, ps: int, jobs: Sequence[str]) -> dict[str, object]:
    """Trains while faults are injected, and returns the figures."""
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


def longest_pause(
    finished_at: Sequence[tuple[float, int]], faults: Sequence[Fault], started_at: float, workers: Sequence[int]
) -> float:
    """Returns the longest time between two results of one worker that no fault affected, in seconds.

    A fault affects its worker from its beginning until the worker's first result after the fault's end; a fault of a
    parameter server affects all workers.

    Args:
      finished_at: the time of each result, in seconds, and its worker; in order.
      faults: the injected faults, with times relative to `started_at`.
      started_at: on the same clock as the results.
      workers: the workers' indices.

    Returns:
      0 if no worker gave two results in a row.
    """
    pauses = [0.0]
    for worker in workers:
        times = [at for at, who in finished_at if who == worker]
        affecting = [
            (started_at + fault.begins, started_at + fault.ends)
            for fault in faults
            if fault.job == "ps" or fault.index == worker
        ]
        for before, after in itertools.pairwise(times):
            # The worker recovers in the pause in which the fault ends.
            if not any(begins <= after and ends >= before for begins, ends in affecting):
                pauses.append(after - before)
    return max(pauses)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the soak, prints the figures, and returns 0 if all of it holds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument("--spare-ps", action="store_true", help="inject faults into workers only")
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
