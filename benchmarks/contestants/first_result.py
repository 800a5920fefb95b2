"""The first function of a program: a variable is created, and a worker adds to it."""

import time

import tensorflow as tf

from benchmarks.contestants.side import Side


class FirstResult:
    """A `Workload` that can be run once: `add`.

    Args:
      side: runs it.
    """

    def __init__(self, side: Side) -> None:
        self._side = side

    def run(self, work: str, seconds: float) -> dict[str, float]:  # noqa: ARG002 - one call, however long it takes
        """See `Workload`: `seconds`, from before the variable is created until the result is known."""
        assert work == "add"
        began = time.perf_counter()
        with self._side.scope():
            total = tf.Variable(0.0)
        self._side.call(tf.function(lambda: total.assign_add(1.0)))
        return {"seconds": time.perf_counter() - began}
