"""The rule of bounded delay: a worker waits before it computes a gradient that could be too late."""

from collections.abc import Sequence
from typing import Any, Unpack

import tensorflow as tf

from coordinator.ps_strategy.membership.cluster_definition import MAX_WORKERS
from coordinator.updates import decisions
from coordinator.updates.rule_state import NO_STEP
from coordinator.updates.rules.accumulating import Accumulating
from coordinator.updates.settings import BoundedDelaySettings
from coordinator.updates.update_rule import CommittedSettings, takes_settings


class BoundedDelay(Accumulating):
    """Lets a worker begin a step only if no gradient can then become more than `max_delay` updates old.

    All steps in flight may overtake a worker that begins, and it may overtake them. So it waits until neither its own
    gradient nor a gradient in flight can come too late, and no work is discarded. The others wait for a slow or dead
    worker only until the client knows that it has no step in flight. (ps-lite's tau: Li et al., OSDI'14, "bounded
    delay".)

    `max_delay=0` is bulk synchronous without rejections: all workers compute concurrently if `grads_to_wait` is their
    number, and one after another if it is 1. `float("inf")` is asynchronous: no worker waits.

    Args:
      optimizer, variables, embeddings, learning_rate, once, require_finite, transfer_dtype, error_feedback: see
        `UpdateRule`.
      max_delay: the largest number of updates between a gradient's pull and its own update; None is no limit, which is
        n-softsync (arXiv 1511.05950) with n = workers / grads_to_wait.
      grads_to_wait: the number of gradients in an update, at least 1.

    Raises:
      ValueError: `max_delay` is not an integer of at least 0, `inf` or None, or `grads_to_wait` not an integer of at
        least 1; and see `UpdateRule`.
    """

    @takes_settings
    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        *,
        max_delay: float | None,
        grads_to_wait: int = 1,
        **settings: Unpack[CommittedSettings],
    ) -> None:
        self._max_delay = BoundedDelaySettings(max_delay, grads_to_wait).largest_delay
        super().__init__(optimizer, variables, grads_to_wait=grads_to_wait, **settings)

    def may_begin(self, worker: Any, clock: Any) -> Any:
        """See `Accumulating`."""
        del clock
        state = self.state
        version, in_flight = state.version.read_value(), state.workers.pulled_version.read_value()
        is_other = (in_flight != NO_STEP) & (tf.range(MAX_WORKERS, dtype=tf.int64) != worker)
        pushed = version * self._grads_to_wait + self.waiting()
        oldest = tf.reduce_min(tf.where(is_other, tf.minimum(in_flight, version), version))
        before = pushed + tf.math.count_nonzero(is_other)
        return decisions.may_start(before, oldest, self._grads_to_wait, self._max_delay)
