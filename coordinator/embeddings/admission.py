"""Which keys get a row of a table. Most keys of large data occur once and should not."""

import dataclasses
from typing import Any

import tensorflow as tf

from coordinator.setting_checks import check_integer, check_number


@dataclasses.dataclass(frozen=True)
class MinCount:
    """Admits a key when it is looked up in training for the n-th time.

    A look-up counts each of its keys once. The servers keep counts for as many pending keys as the table may have rows;
    beyond that, the oldest are dropped.

    Args:
      n: at least 1.
    """

    n: int

    def __post_init__(self) -> None:
        check_integer("n", self.n, 1)

    @property
    def counts(self) -> bool:
        """Whether keys that wait are counted."""
        return self.n > 1

    def admits(self, times: Any) -> Any:
        """Returns which keys are admitted, bool.

        Args:
          times: how often each was looked up before, int64 [n].
        """
        return times + 1 >= self.n


@dataclasses.dataclass(frozen=True)
class Probability:
    """Admits a key with a probability each time that it is looked up in training.

    Nothing is kept of keys that are not admitted. On average, a key is admitted at the 1/p-th time.

    Args:
      p: more than 0, at most 1.
    """

    p: float

    def __post_init__(self) -> None:
        check_number("p", self.p, above=0, maximum=1)

    counts = False

    def admits(self, times: Any) -> Any:
        """Returns which keys are admitted, bool; see `MinCount.admits`."""
        # Without seeds, so that the steps of a fused call draw different numbers.
        return tf.raw_ops.RandomUniform(shape=tf.shape(times), dtype=tf.float32, seed=0, seed2=0) < self.p


Admission = MinCount | Probability
EVERY_KEY = MinCount(1)
