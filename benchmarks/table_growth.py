"""What growing, saving, exporting and evicting cost the steps that run meanwhile, of a large table on two servers.

While one worker looks up and updates 256 rows of a table again and again, the table is filled with rows by the other
worker. Then it is saved in a checkpoint, a hundredth of its rows is updated, a delta is saved, the table is exported
for serving, and the rows that the steps do not use are evicted. Each is compared with `nothing`, some seconds of the
steps alone: on a machine that others use, these have gaps, too.

`longest gap` is the longest time in which no step of the first worker has finished, and 99 of 100 such times are no
longer than `99 % below`; `memory` is how much that of both servers together has grown at most. Rows have 16 numbers,
and as many of Adagrad's accumulator.
"""

import argparse
import contextlib
import itertools
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import psutil
import tensorflow as tf

import coordinator
from coordinator.embeddings import Embedding, OlderThan, Table, export
from coordinator.simulation.result import aligned
from coordinator.testing import LocalCluster

DIM, ROWS_OF_STEP, NEW_ROWS_OF_STEP, CHANGED = 16, 256, 4096, 0.01
ROWS, QUICK_ROWS = 4_000_000, 40_000
# Of the servers' parts of the keys, some are larger than others.
SPARE = 1.02
UNDER_WAY = 4
# So few that all rows but those of the steps have been unused for longer when it is their turn.
UNUSED_STEPS = 100
PAUSE, SAMPLE = 5.0, 0.02


class Cost(NamedTuple):
    """What an action has cost, in seconds and bytes."""

    seconds: float
    gap: float
    usual_gap: float
    memory: int
    size: int


class GrowingTable:
    """A table on the parameter servers of a strategy, and the steps that use it.

    Args:
      strategy: of two workers; each step is one call.
      servers: the processes of the parameter servers.
      rows: of the table, in the end.
    """

    def __init__(self, strategy: coordinator.ParameterServerStrategy, servers: Sequence[int], rows: int) -> None:
        self._strategy, self._rows = strategy, rows
        self._servers = [psutil.Process(server) for server in servers]
        with strategy.scope():
            eviction = [OlderThan(steps=UNUSED_STEPS)]
            self.table = Table("rows", DIM, int(rows * SPARE), keras.optimizers.Adagrad(0.1), eviction=eviction)
            keys = keras.Input((1,), dtype="int64")
            outputs = keras.layers.Dense(1)(keras.layers.Flatten()(Embedding(self.table)(keys)))
            self.model = keras.Model(keys, outputs)
        few = max(ROWS_OF_STEP, int(rows * CHANGED))

        def train(keys: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self.table.lookup(keys, training=True) ** 2)
            self.table.apply_gradients(tape.gradient(loss, self.table.variable))

        @tf.function
        def update(number: Any) -> None:
            del number
            train(tf.random.uniform([ROWS_OF_STEP], 0, few, tf.int64))

        @tf.function
        def fill(first: Any) -> None:
            train(tf.range(first, tf.minimum(first + NEW_ROWS_OF_STEP, rows)))

        self._update, self._fill, self._few = update, fill, few

    def fill(self, rows: int) -> None:
        """Trains on the first keys, on the second worker."""
        futures = [
            self._strategy.schedule(self._fill, args=(np.int64(first),), worker=1)
            for first in range(0, rows, NEW_ROWS_OF_STEP)
        ]
        for future in futures:
            future.result()

    def change_some(self) -> None:
        """Updates a hundredth of the rows."""
        self.fill(self._few)

    @contextlib.contextmanager
    def _updated(self) -> Iterator[list[float]]:
        """A scope in which steps of the first worker run; yields the times at which they finish."""
        finished: list[float] = []
        ended = threading.Event()

        def train() -> None:
            under_way: list[coordinator.Future] = []
            while not ended.is_set():
                under_way.append(self._strategy.schedule(self._update, args=(np.int64(0),), worker=0))
                under_way[-1].add_done_callback(lambda _: finished.append(time.monotonic()))
                if len(under_way) > UNDER_WAY:
                    under_way.pop(0).result()

        thread = threading.Thread(target=train, name="coordinator-benchmark")
        thread.start()
        try:
            yield finished
        finally:
            ended.set()
            thread.join()
            self._strategy.join()

    @contextlib.contextmanager
    def _measured_memory(self) -> Iterator[list[int]]:
        """A scope that yields the bytes of the servers' memory again and again."""
        ended = threading.Event()
        found = [self._memory()]

        def sample() -> None:
            while not ended.wait(SAMPLE):
                found.append(self._memory())

        thread = threading.Thread(target=sample, name="coordinator-benchmark-memory")
        thread.start()
        try:
            yield found
        finally:
            ended.set()
            thread.join()

    def _memory(self) -> int:
        return sum(server.memory_info().rss for server in self._servers)

    def cost(self, act: Callable[[], object], folder: pathlib.Path | None = None) -> Cost:
        """Returns what an action costs that writes into a folder, while steps run."""
        with self._updated() as finished:
            while len(finished) < 2 * UNDER_WAY:
                time.sleep(SAMPLE)
            with self._measured_memory() as memory:
                began = time.monotonic()
                act()
                ended = time.monotonic()
            count = len(finished)
            while len(finished) < count + 2 * UNDER_WAY:
                time.sleep(SAMPLE)
        times = [each for each in finished if each > began - 1.0]
        gaps = sorted(after - before for before, after in itertools.pairwise(times) if after > began and before < ended)
        size = 0 if folder is None else sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
        usual = gaps[int(len(gaps) * 0.99)]
        return Cost(ended - began, gaps[-1], usual, max(memory) - memory[0], size)


def measure(rows: int, pause: float, show: Callable[[str], object]) -> dict[str, Cost]:
    """Returns the costs of each action."""
    one_by_one = coordinator.Options(steps_per_dispatch=1)
    with (
        tempfile.TemporaryDirectory() as name,
        LocalCluster(workers=2, ps=2) as cluster,
        coordinator.ParameterServerStrategy(cluster.resolver, options=one_by_one) as strategy,
    ):
        servers = [process for (job, _), process in cluster.processes.items() if job == "ps" and process]
        grown, folder = GrowingTable(strategy, servers, rows), pathlib.Path(name)
        checkpoint = tf.train.Checkpoint(table=grown.table)
        grown.change_some()
        grown.cost(lambda: time.sleep(pause))  # not counted: everything is traced and connected
        actions: dict[str, tuple[Callable[[], object], str]] = {
            "nothing": (lambda: time.sleep(pause), ""),
            f"growing to {rows:,} rows": (lambda: grown.fill(rows), ""),
            "checkpoint": (lambda: checkpoint.write(str(folder / "full" / "ckpt")), "full"),
            "updating a hundredth": (grown.change_some, ""),
            "delta of it": (lambda: grown.table.save_delta(str(folder / "delta" / "delta")), "delta"),
            "export": (lambda: export(grown.model, str(folder / "export")), "export"),
            "evicting unused rows": (grown.table.evict, ""),
        }
        found = {}
        for action, (act, written) in actions.items():
            show(action)
            found[action] = grown.cost(act, folder / written if written else None)
        return found


def table(found: dict[str, Cost]) -> str:
    """Returns a row for each action."""
    rows = [
        (
            action,
            f"{cost.seconds:.1f}",
            *(f"{gap * 1e3:.0f}" for gap in (cost.gap, cost.usual_gap)),
            *(f"{size / 1e6:,.1f}" for size in (cost.memory, cost.size)),
        )
        for action, cost in found.items()
    ]
    return aligned(("", "seconds", "longest gap, ms", "99 % below", "memory, MB", "written, MB"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table_growth", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=ROWS, help=f"of the table (default: {ROWS:,})")
    parser.add_argument("--quick", action="store_true", help="few rows, to see that it works")
    options = parser.parse_args(arguments)
    rows, pause = (QUICK_ROWS, 0.5) if options.quick else (options.rows, PAUSE)
    print(table(measure(rows, pause, lambda action: print(action, flush=True))))


if __name__ == "__main__":
    main()
