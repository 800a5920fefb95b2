"""How long a step pauses between pull and push: it stands for work, but leaves the processor to others.

So stragglers can be had on a machine of two cores, and what is measured is what a rule makes workers wait, not how fast
the machine is.
"""

import dataclasses
from typing import Any, Protocol

import tensorflow as tf

from coordinator.updates.state.gate import pause


class Pauses(Protocol):
    """Says how long steps pause."""

    def seconds(self, worker: Any, step: Any) -> Any:
        """For a worker's index and the number of a step, int64 scalars: seconds, a float64 scalar."""


@dataclasses.dataclass(frozen=True)
class OneSlowWorker:
    """All workers take the same time but one, which takes a multiple of it.

    Attributes:
      unit: what a step takes, in seconds.
      slow_worker: the index of the slow one.
      factor: how much longer it takes.
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
    """Any worker may be slow at any step, now and then very slow; the same steps are slow in every run.

    Attributes:
      unit: what most steps take, in seconds.
      factors: how much longer some take.
      shares: the share of the steps, from 0 to 1, that takes each factor at least; falling.
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
    """Steps take what they take."""

    def seconds(self, worker: Any, step: Any) -> Any:  # noqa: ARG002
        """See `Pauses`."""
        return tf.constant(0.0, tf.float64)


def paused(gradients: list[Any], after: Any, seconds: Any) -> list[Any]:
    """The same gradients, which are there only after a pause.

    Args:
      gradients: tensors.
      after: a tensor; the pause begins when it is there.
      seconds: a float64 scalar.
    """
    with tf.control_dependencies([after]):
        slept = pause(tf.identity(seconds))
    with tf.control_dependencies([slept]):
        return [tf.identity(gradient) for gradient in gradients]
