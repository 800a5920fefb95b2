"""The rule of injected delay: a pushed gradient is applied by the first pull after its delay is over.

worker 0   pull v0 -- push g1                         pull: g1 is due    v1 ...
worker 1   pull v0 ------- push g2     pull v0                  pull: g2 is due    v2 ...
servers               g1   g1 g2       g1 g2          g2

(Asynchronous Deep Learning Test-bed to Analyze Gradient Staleness Effect.)
"""

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import tensorflow as tf

from coordinator.updates.accumulating import Accumulating
from coordinator.updates.delayed_pushes import DelayedPushes
from coordinator.updates.gradient_store import ChosenRows
from coordinator.updates.pulled import Pulled
from coordinator.updates.queued_columns import QueuedColumns
from coordinator.updates.sent_gradients import SentGradients
from coordinator.updates.state.queued_gradients import QueuedGradients
from coordinator.updates.update_rule import UpdateRule


class Delayed(Accumulating):
    """Queues gradients on the parameter servers, so that the effect of staleness can be seen at any staleness.

    A pull first applies, in the order of their pushes, one update each, all gradients that were pushed more than their
    delay ago; then it brings the model. A gradient that is due later does not hold up those behind it. With a delay of
    0 that is the asynchronous rule, but for the time between a push and the next pull.

    Nothing queued is lost: not when a worker dies, for it is on the servers; not in a checkpoint, which has the queue
    (delays go on from the time of the push); not at the end, if `flush` is called.

    The staleness of a gradient is counted when it is applied: the version then less the version at its pull. All times
    are those of one clock, the home server's.

    Args:
      optimizer, variables, embeddings, learning_rate: see `UpdateRule`. The learning rate and the count of updates that
        a gradient is applied with are those that its step has pulled.
      delay: seconds, `math.inf` for until `flush`; or a function that takes a worker's index, an int64 scalar, and the
        time of the push in seconds since 1970, a float64 scalar, and returns seconds, a scalar. It is called for
        each push, in a graph: AutoGraph turns its conditions into graph operations, and random numbers are those of
        `tf.random`. What it returns below 0 is as 0.

    Raises:
      TypeError: `delay` is neither a number nor a function; and see `UpdateRule`.
      ValueError: `delay` is below 0 or not a number; and see `UpdateRule`.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        delay: float | Callable[[Any, Any], Any],
        *,
        embeddings: Sequence[Any] = (),
        learning_rate: Any = None,
    ) -> None:
        self._delay = _delay_function(delay)
        super().__init__(optimizer, variables, 1, embeddings=embeddings, learning_rate=learning_rate)
        self._release = self._new_release()

    def flush(self) -> int:
        """Applies all that is queued, whatever its delay; to be called after `strategy.join()`, at the end of training.

        Returns:
          How many gradients that were.

        Raises:
          StrategyClosedError: the strategy is closed.
          tf.errors.OpError: a parameter server does not answer.
        """
        return super().flush()

    def _begin(self) -> Any:
        with tf.device(self.ledger.home):
            made = self._build_updates(self._accumulator.committed.release(False))
            with tf.control_dependencies(made):
                return self.ledger.version.read_value()

    def _push(self, gradients: dict[int, Any], pulled: Pulled) -> Any:
        there, added = self._bring(gradients, pulled)
        with tf.device(self.ledger.home), tf.control_dependencies(added):
            return self._accumulator.committed.commit(*there)

    def _apply_rows(self, server: Any, rows: ChosenRows) -> None:
        device = server.store.device
        *scalars, rate = server.columns.scalars(rows)

        def apply(number: int, gradient: Any) -> None:
            self._apply(SentGradients(device, [number], [gradient], [], 0), scalars, rate)

        server.columns.apply(rows, apply)

    def _new_columns(self, device: str, scalars: Sequence[tf.DType]) -> QueuedColumns:
        return QueuedColumns(self._parts.model, device, scalars)

    def _new_committed(self) -> DelayedPushes:
        return DelayedPushes(self.ledger, self._delay)

    def _is_layout_known(self) -> bool:
        return True

    def _make_last_updates(self) -> int:
        queued = len(self._release(tf.constant(True)))
        # Counted before: who finishes what a worker may have left behind may be making some of them now.
        super()._make_last_updates()
        return queued

    def _end(self) -> None:
        super()._end()
        # A rule that keeps none should not seem to restore them.
        del self.ledger.queued

    def _go_on_from(self, rule: UpdateRule) -> None:
        super()._go_on_from(rule)
        self._release = self._new_release()

    def _new_release(self) -> Any:
        """How the client releases what is queued; gives the ledger its place in checkpoints, too."""
        pushes = self._accumulator.committed
        self.ledger.queued = QueuedGradients(pushes, self._accumulator.servers)
        return tf.function(pushes.release, input_signature=[tf.TensorSpec([], tf.bool)], autograph=False)


def _delay_function(delay: Any) -> Callable[[Any, Any], Any]:
    if callable(delay):
        function = tf.function(delay)
        return lambda worker, time: tf.ensure_shape(tf.cast(function(worker, time), tf.float64), [])
    if isinstance(delay, bool) or not isinstance(delay, Real):
        raise TypeError(f"delay must be a number of seconds or a function of worker and time, got {delay!r}.")
    if math.isnan(delay) or delay < 0:
        raise ValueError(f"delay must be at least 0 seconds, got {delay!r}.")
    return lambda _, __: tf.constant(float(delay), tf.float64)
