"""The rule of injected delay: a pushed gradient is applied by the first pull after its delay is over.

worker 0   pull v0 -- push g1                         pull: g1 is due    v1 ...
worker 1   pull v0 ------- push g2     pull v0                  pull: g2 is due    v2 ...
servers               g1   g1 g2       g1 g2          g2

(Asynchronous Deep Learning Test-bed to Analyze Gradient Staleness Effect.)
"""

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import tensorflow as tf

from coordinator.updates.gradient_store import ChosenRows, DelayedPushes, GradientStore, QueuedGradients
from coordinator.updates.rules.accumulating import Accumulating
from coordinator.updates.settings import DelayedSettings
from coordinator.updates.update_rule import RoundedSettings, takes_settings


class Delayed(Accumulating):
    """Queues gradients on the parameter servers, to study the effect of any staleness.

    A pull first applies all gradients that were pushed more than their delay ago, in the order of their pushes, one
    update each; then it pulls the model. A gradient that is due later does not block the gradients behind it. A delay
    of 0 is the asynchronous rule, except for the time between a push and the next pull.

    No queued gradient is lost. It is on the servers, so its worker may die; a checkpoint contains the queue (delays
    count from the time of the push); and `flush` applies the gradients that are left at the end.

    The staleness of a gradient is counted when it is applied: the version then minus the version at its pull. All times
    are read from one clock, the home server's.

    Args:
      optimizer, variables, embeddings, learning_rate, require_finite, transfer_dtype, error_feedback: see
        `UpdateRule`. A gradient is applied with the learning rate and the count of updates that its step has pulled.
      delay: seconds, `math.inf` for until `flush`; or a function that takes a worker's index, an int64 scalar, and the
        time of the push in seconds since 1970, a float64 scalar, and returns seconds, a scalar. It is called for each
        push, in a graph: AutoGraph converts its conditions, and random numbers come from `tf.random`. Results below 0
        count as 0.

    Raises:
      TypeError: `delay` is neither a number nor a function; and see `UpdateRule`.
      ValueError: `delay` is below 0 or not a number; and see `UpdateRule`.
    """

    _has_kinds = True
    _log: DelayedPushes

    @takes_settings
    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        *,
        delay: float | Callable[[Any, Any], Any],
        **settings: Unpack[RoundedSettings],
    ) -> None:
        DelayedSettings(delay)
        function = tf.function(delay) if callable(delay) else lambda *_: tf.constant(float(delay), tf.float64)
        self._delay = lambda worker, time: tf.ensure_shape(tf.cast(function(worker, time), tf.float64), [])
        super().__init__(optimizer, variables, grads_to_wait=1, **settings)

    @property
    def may_wait(self) -> bool:
        """True: a pull applies what is due, which may be much."""
        return True

    def settle(self) -> None:
        """Does nothing: queued gradients should stay late at the end of an epoch."""

    def _begin_step(self) -> Any:
        with tf.control_dependencies(self._build_updates(self._log.release(False))):
            return super()._begin_step()

    def _apply_rows(self, store: GradientStore, rows: ChosenRows) -> None:
        *scalars, rate = store.scalars(rows)
        store.apply_first(rows, lambda n, gradient: self._apply(store.device, {n: gradient}, scalars, rate))

    def _new_log(self) -> DelayedPushes:
        return DelayedPushes(self.state, self._delay)

    def _make_last_updates(self) -> int:
        queued = len(self._log.release(True))
        # Counted first: another thread may just be finishing some of the updates of a dead worker.
        super()._make_last_updates()
        return queued

    def _finish(self) -> None:
        super()._finish()
        # Checkpoints of the next rule have no queue.
        del self.state.queued

    def _use_state(self) -> None:
        super()._use_state()
        self.state.queued = QueuedGradients(self._log, self._stores)
