"""What steps sleep for instead of computing: times that vary, and one worker that is slow."""

import dataclasses
import functools
import math
import statistics
from typing import Any

import tensorflow as tf

# How many times the table has: from a draw to the next nobody could tell it from the distribution itself.
_SIZE = 64


@dataclasses.dataclass(frozen=True)
class Sleeps:
    """Lognormal times, and one slow worker, the last.

    They vary, for workers that all took the same time would keep in step or out of it for ever, by chance.

    Attributes:
      median: of a usual worker's step, in seconds.
      sigma: the deviation of the times' logarithm.
      slow_factor: how many times as long the slow worker sleeps.
    """

    median: float = 0.1
    sigma: float = 0.25
    slow_factor: float = 2.5

    @functools.cached_property
    def table(self) -> tuple[float, ...]:
        """The times of a usual worker, each as likely as the others, in seconds, rising."""
        normal = statistics.NormalDist(0.0, self.sigma)
        return tuple(self.median * math.exp(normal.inv_cdf((place + 0.5) / _SIZE)) for place in range(_SIZE))

    @property
    def mean(self) -> float:
        """Of a usual worker's step, in seconds."""
        return statistics.fmean(self.table)

    def drawn(self, worker: Any, slow_worker: Any) -> Any:
        """What a step sleeps for, drawn in its graph.

        Args:
          worker: whose step it is, by index; an int64 scalar, as the next.
          slow_worker: the index of the slow one.

        Returns:
          Seconds, a float64 scalar.
        """
        table = tf.constant(self.table, tf.float64)
        seconds = table[tf.random.uniform([], 0, _SIZE, tf.int32)]
        return tf.where(worker == slow_worker, self.slow_factor * seconds, seconds)

    def __str__(self) -> str:
        return (
            f"lognormal({1e3 * self.median:g}ms,{self.sigma:g}), mean {1e3 * self.mean:.1f} ms; on the last worker "
            f"{self.slow_factor:g} times that"
        )
