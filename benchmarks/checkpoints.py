"""What a checkpoint of 1 GB on two parameter servers costs the steps that run meanwhile.

Ways to save take turns on one cluster: `background` and `in quiet()` are `coordinator.Checkpoints`, `manager` a
`tf.train.CheckpointManager` that `restore_from` was given. Each step looks up and changes 256 rows of a quarter of the
variables. A round has a few seconds of steps and one save. `pause` is how long no step may begin, `longest gap` the
longest time in which no step has finished; `rate while saved` is that from the call of `save` to the complete
checkpoint, in parts of the rate before, so it bears a machine that others use too.
"""

import argparse
import collections
import contextlib
import itertools
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import coordinator
from benchmarks.alternated import alternated
from benchmarks.rounds import Rounds
from coordinator.simulation.result import aligned
from coordinator.testing import LocalCluster

TABLES, CHANGED, DIM, ROWS_OF_STEP = 8, 2, 64, 256
UNDER_WAY = 40
BEFORE, AFTER = 4.0, 0.5


class Model(NamedTuple):
    """Variables on two parameter servers, and a step that changes some of them."""

    tables: Sequence[tf.Variable]
    count: tf.Variable
    step: Any


def new_model(strategy: coordinator.ParameterServerStrategy, size: int) -> Model:
    """Returns a model whose variables have `size` bytes."""
    rows = size // TABLES // DIM // 4
    with strategy.scope():
        tables = [tf.Variable(lambda: tf.zeros([rows, DIM])) for _ in range(TABLES)]
        count = tf.Variable(0, dtype=tf.int64, trainable=False)

    @tf.function
    def step(number: Any) -> None:
        del number
        ids = tf.random.uniform([ROWS_OF_STEP], 0, rows, tf.int64)
        for table in tables[:CHANGED]:
            changed = tf.gather(table, ids) * 0.9 + 0.1
            table.scatter_add(tf.IndexedSlices(changed, ids))
        count.assign_add(1)

    return Model(tables, count, step)


@contextlib.contextmanager
def training(strategy: coordinator.ParameterServerStrategy, model: Model) -> Iterator[list[float]]:
    """A scope in which steps run; yields the times at which they finish."""
    finished: list[float] = []
    ended = threading.Event()

    def train() -> None:
        queued: collections.deque[coordinator.Future] = collections.deque()
        for number in itertools.count():
            if ended.is_set():
                return
            queued.append(strategy.schedule(model.step, args=(np.int64(number),)))
            queued[-1].add_done_callback(lambda _: finished.append(time.monotonic()))
            if len(queued) > UNDER_WAY:
                queued.popleft().result()

    thread = threading.Thread(target=train, name="coordinator-benchmark")
    thread.start()
    try:
        yield finished
    finally:
        ended.set()
        thread.join()
        strategy.join()


def saver(strategy: coordinator.ParameterServerStrategy, model: Model, way: str, folder: str) -> Callable[[], float]:
    """Returns what saves, waits until all is written, and returns the pause."""
    checkpoint = tf.train.Checkpoint(tables=model.tables, count=model.count)
    if way == "manager":
        manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=1)
        strategy.restore_from(manager)

        def save() -> float:
            began = time.monotonic()
            manager.save()
            return time.monotonic() - began

        return save
    checkpoints = coordinator.Checkpoints(checkpoint, folder, background=way == "background")
    strategy.restore_from(checkpoints)

    def save_snapshot() -> float:
        checkpoints.save(now=True)
        while checkpoints.statistics().saved + checkpoints.statistics().failed == 0:
            time.sleep(0.01)  # `wait` would hurry it
        checkpoints.wait()
        return checkpoints.statistics().pause

    return save_snapshot


def steady_at(finished: Sequence[float], seconds: float) -> float:
    """Trains for some seconds, and longer if no step has finished in the latter half; returns the time then."""
    while True:
        time.sleep(seconds)
        now = time.monotonic()
        if finished and finished[-1] > now - seconds / 2:
            return now


def round_of(strategy: coordinator.ParameterServerStrategy, model: Model, way: str, seconds: float) -> dict[str, Any]:
    """Returns the figures of one round."""
    with tempfile.TemporaryDirectory() as folder:
        save = saver(strategy, model, way, folder)
        with training(strategy, model) as finished:
            began = steady_at(finished, seconds)
            pause = save()
            ended = time.monotonic()
            time.sleep(AFTER)
        size = sum(file.stat().st_size for file in pathlib.Path(folder).glob("ckpt-1.*"))
    before = sum(began - seconds / 2 < each < began for each in finished) / (seconds / 2)
    while_saved = sum(began < each < ended for each in finished) / (ended - began)
    near = [each for each in finished if began - AFTER < each < ended + AFTER]
    figures = {
        "pause": pause,
        "gap": max(after - each for each, after in itertools.pairwise(near)),
        "seconds": ended - began,
        "rate": while_saved / before,
        "size": size,
    }
    return {"figures": figures}


def measure(size: int, repeats: int, seconds: float, show: Callable[[str], object]) -> dict[str, Rounds]:
    """Returns the rounds of each way."""
    with (
        LocalCluster(workers=2, ps=2) as cluster,
        coordinator.ParameterServerStrategy(cluster.resolver) as strategy,
    ):
        model = new_model(strategy, size)
        ways = ("background", "in quiet()", "manager")
        return alternated(
            {way: lambda way=way: round_of(strategy, model, way, seconds) for way in ways},  # type: ignore[misc]
            repeats,
            show,
        )


def table(found: dict[str, Rounds]) -> str:
    """Returns a row for each way, of medians; of the pause, the range, too."""
    rows = []
    for way, rounds in found.items():
        pauses = [each["pause"] for each in rounds.figures] or [0.0]
        spread = f"{min(pauses):.2f} to {max(pauses):.2f}"
        medians = (rounds.text("pause", ".2f"), spread, rounds.text("gap", ".2f"), rounds.text("seconds", ".1f"))
        rows.append((way, *medians, rounds.text("rate", ".2f"), rounds.text("size", ",.0f", 1e-6)))
    return aligned(("way", "pause, s", "range", "longest gap, s", "complete, s", "rate while saved", "MB"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each way (default: 5)")
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the checkpoint (default: 1024)")
    parser.add_argument("--quick", action="store_true", help="one round of a small checkpoint, to see that it works")
    options = parser.parse_args(arguments)
    size, repeats, seconds = (8, 1, 1.0) if options.quick else (options.megabytes, options.repeats, BEFORE)
    print(table(measure(size * 2**20, repeats, seconds, lambda way: print(way, flush=True))))


if __name__ == "__main__":
    main()
