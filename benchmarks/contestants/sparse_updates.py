"""Updates of a large table by gradients of few of its rows, with optimizers of Keras 3."""

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.contestants.side import Side
from coordinator.embeddings import RowwiseAdagrad

ROWS_IN_GRADIENT = 4096
_MOST = 200
_SEED = 0

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(0.01),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.01),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "RowwiseAdagrad": lambda: RowwiseAdagrad(0.01),
}


class SparseUpdates:
    """A `Workload` of updates by gradients of 4,096 random rows: `Adam 1000000 64` is one of 1,000,000 rows of 64.

    The table of the function that was run last is kept, and no other.

    Args:
      side: runs them, with one worker.
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self._work = ""
        self._step: Any = None
        self._values = np.empty([0, 0], np.float32)
        # Seconds for an update, as the previous round found.
        self._seconds = 1.0

    def run(self, work: str, seconds: float) -> dict[str, float]:
        """See `Workload`: `seconds` for an update; all of a round are in one call."""
        if work != self._work:
            self._work, self._step = work, None
            name, rows, width = work.split()
            self._prepare(name, int(rows), int(width))
        self._seconds = self._timed(min(max(round(seconds / self._seconds), 1), _MOST))
        return {"seconds": self._seconds}

    def _prepare(self, name: str, rows: int, width: int) -> None:
        with self._side.scope():
            table = keras.Variable(initializer="zeros", shape=(rows, width), dtype="float32")
            optimizer = OPTIMIZERS[name]()
            optimizer.build([table])

        def apply(values: Any, ids: Any) -> None:
            optimizer.apply([tf.IndexedSlices(values, ids, tf.constant([rows, width]))], [table])

        body = self._side.replicated(apply)

        @tf.function
        def step(values: Any, count: Any) -> Any:
            for _ in tf.range(count):
                body(values, tf.random.uniform([ROWS_IN_GRADIENT], 0, rows, tf.int32))
            return count

        self._step = step
        self._values = np.random.default_rng(_SEED).normal(size=(ROWS_IN_GRADIENT, width)).astype(np.float32)
        # Traces the function, and writes to all of the memory once.
        self._timed(1)
        self._seconds = self._timed(1)

    def _timed(self, count: int) -> float:
        began = time.perf_counter()
        self._side.call(self._step, (self._values, np.int32(count)))
        return (time.perf_counter() - began) / count
