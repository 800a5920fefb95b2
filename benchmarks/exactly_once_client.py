"""A client that counts in its model how often each example was trained, while its servers have faults.

`benchmarks.exactly_once` starts it, kills it, and starts it again in the same folder on another cluster. It appends
each fault to `FOLDER/faults` when that is over, and prints what the model has seen, as JSON, when its time is over and
the epoch done.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import coordinator
from coordinator import updates
from coordinator.data import Epochs, arrays
from coordinator.testing import Chaos, LocalCluster

SIZE, WIDTH = 10_000, 20
SAVE_EVERY = 5.0
DEADLINE = 300.0

RULES: Mapping[str, Callable[..., updates.UpdateRule]] = {
    "asynchronous": updates.Asynchronous,
    "synchronous": lambda *args, **settings: updates.Synchronous(*args, grads_to_wait=2, **settings),
    "bounded_delay": lambda *args, **settings: updates.BoundedDelay(*args, max_delay=8, **settings),
}


def add(table: tf.Variable, gradient: tf.IndexedSlices, _: Any) -> None:
    """The update function: adds rows to a table."""
    table.scatter_nd_add(gradient.indices[:, tf.newaxis], gradient.values)


class Training:
    """Steps that add each example's number to one table, and one to another.

    Args:
      strategy: has the tables on its parameter servers.
      rule: of `RULES`.
      folder: for checkpoints.
      timeout: of each step, after which it is run on another worker too; None for none.
      prefetch: how many ranges each worker reads ahead.
    """

    def __init__(
        self,
        strategy: coordinator.ParameterServerStrategy,
        rule: str,
        folder: pathlib.Path,
        timeout: float | None,
        prefetch: int,
    ) -> None:
        self._strategy = strategy
        self._timeout = timeout
        source = arrays(np.arange(SIZE, dtype=np.int64))
        self.epochs = epochs = Epochs(source, WIDTH, 10**6, shuffle=5, prefetch=prefetch)
        # The mean of two gradients is to be their sum. An epoch has an even number of ranges, so that none waits.
        per_update = 2.0 if rule == "synchronous" else 1.0
        with strategy.scope():
            self._tables = tables = [tf.Variable(lambda: tf.zeros([SIZE], tf.float64)) for _ in range(2)]
            self._rule = made = RULES[rule](add, tables, learning_rate=1.0, once=epochs)
        checkpoint = tf.train.Checkpoint(first=tables[0], second=tables[1], rule=made, epochs=epochs)
        self._manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=3)
        self._manager.restore_or_initialize()
        strategy.restore_from(self._manager)

        @tf.function
        def step(positions: Any) -> None:
            (ids,) = tf.nest.flatten(source.read(positions))

            def gradients() -> tuple[Any, list[Any]]:
                values = tf.cast(ids, tf.float64), tf.ones_like(ids, tf.float64)
                return tf.constant(0), [tf.IndexedSlices(value * per_update, ids) for value in values]

            made.run(gradients, positions=positions)

        self._step = step

    def run(self, seconds: float, note_faults: Callable[[], None]) -> None:
        """Trains whole epochs until the time is over, and saves now and then."""
        until = time.monotonic() + seconds
        save_at = time.monotonic()
        while time.monotonic() < until:
            for positions in self.epochs.on(self._strategy, until=self.epochs.epoch + 1):
                self._strategy.schedule(self._step, (positions,), timeout=self._timeout)
                note_faults()
                if time.monotonic() > save_at:
                    self._manager.save()
                    save_at = time.monotonic() + SAVE_EVERY
            self._strategy.join(DEADLINE)

    def found(self) -> dict[str, Any]:
        """Returns how many visits of examples the model lacks, and how many it has too many."""
        numbers = np.arange(SIZE)
        counts = [self._tables[0].numpy()[1:] / numbers[1:], self._tables[1].numpy()]
        epochs = self.epochs.epoch
        return {
            "epochs": epochs,
            "never": [float(np.maximum(epochs - each, 0).sum()) for each in counts],
            "repeated": [float(np.maximum(each - epochs, 0).sum()) for each in counts],
            "refused": self._rule.statistics().rejected,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactly_once_client")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rule", choices=RULES, default="asynchronous")
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--prefetch", type=int, default=0)
    parser.add_argument("--interval", type=float, default=6.0)
    chosen = parser.parse_args(arguments)
    options = coordinator.Options(heartbeat_timeout=5.0, max_attempts=1000, parameter_server_timeout=DEADLINE)
    with (
        (chosen.folder / "faults").open("a", encoding="utf-8") as file,
        LocalCluster(chosen.workers, chosen.ps) as cluster,
        coordinator.ParameterServerStrategy(cluster.resolver, options=options) as strategy,
    ):
        training = Training(strategy, chosen.rule, chosen.folder / "saved", chosen.timeout, chosen.prefetch)
        chaos = Chaos(cluster, seed=chosen.seed, jobs=("worker", "ps"), interval=chosen.interval, duration=(0.5, 8.0))
        noted = 0

        def note_faults() -> None:
            nonlocal noted
            for fault in chaos.faults[noted:]:
                noted += 1
                file.write(json.dumps(dataclasses.asdict(fault)) + "\n")
                file.flush()

        with chaos:
            training.run(chosen.seconds, note_faults)
        note_faults()
        print(json.dumps(training.found()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
