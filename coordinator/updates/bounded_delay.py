"""The rule of bounded delay: workers wait before they compute what would come too late."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from coordinator.updates import decisions
from coordinator.updates.accumulating import Accumulating
from coordinator.updates.committed_pushes import Arrival
from coordinator.updates.state.gate import Gate
from coordinator.updates.state.rule_state import MOST_WORKERS, NOT_UNDER_WAY
from coordinator.updates.update_rule import UpdateRule

# More updates than there will ever be.
_UNBOUNDED = 2**62


class BoundedDelay(Accumulating):
    """Lets a worker begin a step only if no gradient can become more than `max_delay` updates old by that.

    A worker that begins may be overtaken by all who are under way, and it may overtake them: it waits until neither its
    own gradient nor one of theirs can come too late. So no work is thrown away, and a worker that is slow, or dies, is
    waited for only until the client knows that it has nothing under way. (ps-lite's tau: Li et al., OSDI'14, "bounded
    delay".)

    `max_delay=0` is bulk synchronous, without rejections: with `grads_to_wait` as the number of workers all compute at
    the same time, with 1 one after another. `float("inf")` is asynchronous: nobody waits.

    Args:
      optimizer, variables, embeddings, learning_rate: see `UpdateRule`.
      max_delay: the most updates that may lie between a gradient's pull and its own update; None is no limit.
      grads_to_wait: how many gradients make an update, at least 1.

    Raises:
      ValueError: `max_delay` is no whole number of at least 0, or `grads_to_wait` none of at least 1; and see
        `UpdateRule`.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        max_delay: float | None,
        *,
        grads_to_wait: int = 1,
        embeddings: Sequence[Any] = (),
        learning_rate: Any = None,
    ) -> None:
        unbounded = max_delay is None or max_delay == float("inf")
        if not unbounded and (isinstance(max_delay, bool) or not isinstance(max_delay, int) or max_delay < 0):
            raise ValueError(f'max_delay must be a whole number of at least 0, or float("inf"), got {max_delay!r}.')
        self._max_delay = _UNBOUNDED if max_delay is None or unbounded else int(max_delay)
        super().__init__(optimizer, variables, grads_to_wait, embeddings=embeddings, learning_rate=learning_rate)
        self._gate = self._new_gate()

    def _begin(self) -> Any:
        version, _ = self._gate.wait_open()
        return version

    def _new_gate(self) -> Gate:
        return Gate(self._parts.strategy, self.ledger, lambda worker, _: self._may_begin(worker))

    def _may_begin(self, worker: Any) -> Any:
        """Whether a worker may compute a gradient; on the home server, under the ledger's lock."""
        ledger = self.ledger
        version, under_way = ledger.version.read_value(), ledger.present.pulled_version.read_value()
        is_other = (under_way != NOT_UNDER_WAY) & (tf.range(MOST_WORKERS, dtype=tf.int64) != worker)
        pushed = version * self._grads_to_wait + self._accumulator.committed.waiting()
        oldest = tf.reduce_min(tf.where(is_other, tf.minimum(under_way, version), version))
        before = pushed + tf.math.count_nonzero(is_other)
        return decisions.may_start(before, oldest, self._grads_to_wait, self._max_delay)

    def _is_accepted(self, push: Arrival) -> Any:
        """All are, but those of calls that were given up: nobody has waited for them."""
        return self.ledger.present.pulled_version.sparse_read(push.worker) == push.pulled_version

    def _go_on_from(self, rule: UpdateRule) -> None:
        super()._go_on_from(rule)
        self._gate = self._new_gate()
