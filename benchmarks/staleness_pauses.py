"""Pauses of steps between pull and push: they simulate work without using the processor.

So two cores can have stragglers, and the time that a rule makes workers wait is measured, not the speed of the machine.
"""

import dataclasses
from typing import Any, Protocol

import tensorflow as tf


class Pauses(Protocol):
    """The lengths of pauses."""

    def seconds(self, worker: Any, step: Any) -> Any:
        """Returns seconds, a float64 scalar, for a worker's index and the number of a step, int64 scalars."""


@dataclasses.dataclass(frozen=True)
class OneSlowWorker:
    """All workers but one take the same time; one takes a multiple of it.

    Attributes:
      unit: the time of a step, in seconds.
      slow_worker: the index of the slow one.
      factor: the multiple.
    """

    unit: float
    slow_worker: int
    factor: float

    def seconds(self, worker: Any, step: Any) -> Any:  # noqa: ARG002
        """See `Pauses`."""
        is_slow = tf.equal(worker, self.slow_worker)
        return tf.where(is_slow, tf.constant(self.unit * self.factor, tf.float64), tf.constant(self.unit, tf.float64))


@dataclasses.dataclass(frozen=True)
class HeavyTail:
    """Random steps of all workers are slow, a few very slow; the same steps in every run.

    Attributes:
      unit: the time of most steps, in seconds.
      factors: the multiples that slow steps take.
      shares: the share of the steps, from 0 to 1, that takes at least each factor; decreasing.
    """

    unit: float
    factors: tuple[float, ...] = (8.0, 40.0)
    shares: tuple[float, ...] = (0.15, 0.05)

    def seconds(self, worker: Any, step: Any) -> Any:  # noqa: ARG002
        """See `Pauses`."""
        chance = tf.random.stateless_uniform([], tf.stack([tf.constant(0, tf.int64), step]))
        factor = tf.constant(1.0, tf.float64)
        for slower, share in zip(self.factors, self.shares, strict=True):
            factor = tf.where(chance < share, tf.constant(slower, tf.float64), factor)
        return factor * self.unit


@dataclasses.dataclass(frozen=True)
class NoPauses:
    """No pauses."""

    def seconds(self, worker: Any, step: Any) -> Any:  # noqa: ARG002
        """See `Pauses`."""
        return tf.constant(0.0, tf.float64)
