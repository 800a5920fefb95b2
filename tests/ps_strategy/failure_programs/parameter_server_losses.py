"""A client whose parameter servers die, in one way after another; after each, a new strategy resumes a checkpoint.

Its arguments are names of `CASES`. It prints one JSON object: for each of them, what the caller saw.
"""

import dataclasses
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster
from tests.deadline import wait_until

TIMEOUT = 120.0
STEPS = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """The servers that die, and when.

    Attributes:
      lost: the servers.
      is_busy: whether functions run and wait at that moment.
      is_restarted: whether the servers are up again before the next call.
    """

    lost: tuple[tuple[str, int], ...]
    is_busy: bool = False
    is_restarted: bool = False


CASES = {
    "one, while functions run": Case((("ps", 0),), is_busy=True),
    "one, restarted between two calls": Case((("ps", 1),), is_restarted=True),
    "all, between two calls": Case((("ps", 0), ("ps", 1))),
    "one and a worker, while functions run": Case((("ps", 0), ("worker", 1)), is_busy=True),
    "one and every worker, while functions run": Case((("ps", 1), ("worker", 0), ("worker", 1)), is_busy=True),
}


class Training:
    """A step that counts on each of two parameter servers, and a checkpoint of the counts."""

    def __init__(self, strategy: coordinator.ParameterServerStrategy, folder: Path) -> None:
        self.strategy = strategy
        with strategy.scope():
            counts = [tf.Variable(0), tf.Variable(0)]
        self._checkpoint = tf.train.Checkpoint(counts=counts)
        self._path = folder / "checkpoint"

        @tf.function
        def step() -> tf.Tensor:
            return sum(count.assign_add(1) for count in counts)

        self.schedule = lambda: strategy.schedule(step)
        self.counts = lambda: [int(count.numpy()) for count in counts]

    def create_more(self) -> None:
        """Creates a variable on each server."""
        with self.strategy.scope():
            for _ in range(2):
                tf.Variable(0)

    def resume(self) -> list[int]:
        """Restores the checkpoint, if there is one, and returns the counts."""
        if self._path.with_suffix(".index").exists():
            self._checkpoint.read(str(self._path)).assert_consumed()
        return self.counts()

    def train(self) -> None:
        """Runs some steps, and saves a checkpoint."""
        for _ in range(STEPS):
            self.schedule()
        self.strategy.join(TIMEOUT)
        self._checkpoint.write(str(self._path))


def observe(call: Callable[[], Any]) -> dict[str, Any]:
    """Returns the error that a call raises, and how soon; the call must not hang."""
    start = time.monotonic()
    try:
        call()
    except coordinator.ParameterServerLost as error:
        seen = {"raised": type(error).__name__, "task": error.task, "cause": type(error.original_exception).__name__}
        seen["traceback"] = "".join(traceback.format_exception(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, the test judges it
        seen = {"raised": repr(error)}
    else:
        seen = {"raised": None}
    return {**seen, "seconds": time.monotonic() - start}


def fail(cluster: LocalCluster, case: Case, training: Training) -> dict[str, Any]:
    """Runs the case, and returns what the caller saw."""
    strategy = training.strategy
    resumed = training.resume()
    training.train()
    futures = [training.schedule() for _ in range(2_000)] if case.is_busy else []
    if futures:
        futures[20].result(TIMEOUT)
    for job, index in case.lost:
        cluster.restart(job, index) if case.is_restarted else cluster.kill(job, index)
    futures.append(training.schedule()) if not futures else None

    join = observe(lambda: strategy.join(TIMEOUT))
    outcomes = {type(future.exception(timeout=0)).__name__ for future in futures}
    # A join after more work, and the schedule after the work that failed.
    again = observe(lambda: (training.schedule(), strategy.join(TIMEOUT)))
    failing = training.schedule()
    wait_until(failing.done)
    schedule = observe(training.schedule)
    return {
        "resumed": resumed,
        "join": join,
        "outcomes": sorted(outcomes - {"NoneType"}),
        "join again": again,
        "schedule": schedule,
        "create": observe(training.create_more),
        "healthy": [server.healthy() for server in strategy.parameter_servers],
        "close": observe(strategy.close),
    }


def main() -> None:
    seen = {}
    with LocalCluster(workers=2, ps=2) as cluster, tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:]:
            case = CASES[name]
            strategy = coordinator.ParameterServerStrategy(cluster.resolver)
            seen[name] = fail(cluster, case, Training(strategy, Path(folder)))
            dead = [task for task in case.lost if not cluster.is_alive(*task)]
            for task in dead:
                cluster.restart(*task, wait=False)
            for task in dead:
                cluster.wait_ready(*task)
        with coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
            training = Training(strategy, Path(folder))
            training.resume()
            training.train()
            healthy = [server.healthy() for server in strategy.parameter_servers]
            seen["afterwards"] = {"resumed": training.counts(), "healthy": healthy}
    print(json.dumps(seen))  # noqa: T201 - its answer


if __name__ == "__main__":
    main()
