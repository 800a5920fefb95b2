"""Small functions, many of them queued at once: the cost of dispatching."""

from typing import Any

import tensorflow as tf

from benchmarks.contestants.rate_meter import RateMeter
from benchmarks.contestants.side import Side

# Enough calls are queued at once to be fused, also on a busy machine.
LEAST_RATE = 500.0


class Closures:
    """A `Workload` of functions that do almost nothing: `empty`, `scalar` and `assign_add`.

    Args:
      side: runs them.
    """

    def __init__(self, side: Side) -> None:
        with side.scope():
            total = tf.Variable(0.0)
        functions = {"empty": tf.function(_empty), "scalar": tf.function(_scalar), "assign_add": _adds_to(total)}
        self._meters = {
            name: RateMeter(lambda count, function=function: side.run(function, (), count), LEAST_RATE)
            for name, function in functions.items()
        }

    def run(self, work: str, seconds: float) -> dict[str, float]:
        """See `Workload`: `rate`, in closures per second, from the first schedule to the end of the last."""
        return {"rate": self._meters[work].rate(seconds)}


def _empty() -> None:
    return


def _scalar() -> tf.Tensor:
    return tf.constant(1.0)


def _adds_to(total: tf.Variable) -> Any:
    @tf.function
    def add() -> None:
        total.assign_add(1.0)

    return add
