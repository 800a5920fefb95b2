"""Arrays of the client of which each worker has a copy in its memory."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class WorkerArrays:
    """Arrays for scheduled functions, which read their worker's copy; elsewhere the client's own are read.

    Args:
      values: the arrays, which must not be changed afterwards; or functions that return them on each worker.
    """

    def __init__(self, values: Sequence[np.ndarray[Any, Any] | Callable[[], Any]]) -> None:
        self._values = values
        self._local: list[tf.Tensor] | None = None
        # By the strategy: a variable with a copy on each of its workers for each array.
        self._copies: weakref.WeakKeyDictionary[Any, list[tf.Variable]] = weakref.WeakKeyDictionary()

    def prepare(self, strategy: Any) -> None:
        """Gives each worker of a strategy its copies, when it first reads them. A second call has no effect."""
        if strategy not in self._copies and _has_workers(strategy):
            with strategy.scope():
                self._copies[strategy] = [
                    tf.Variable(each, trainable=False, per_worker_variable=True, name="data") for each in self._values
                ]

    def read(self) -> Sequence[Any]:
        """Returns the arrays, as tensors or variables, for the function that is being traced.

        Raises:
          RuntimeError: `prepare` was not called for its strategy.
        """
        strategy = tf.distribute.get_strategy()
        if tf.executing_eagerly() or not _has_workers(strategy):
            if self._local is None:
                with tf.init_scope(), tf.device("/device:CPU:0"):
                    self._local = [each() if callable(each) else tf.constant(each) for each in self._values]
            return self._local
        if strategy not in self._copies:
            raise RuntimeError(
                "source.read was traced before the workers could read the source: call epochs.on(strategy) first, and "
                "schedule the function in its loop."
            )
        return self._copies[strategy]


def _has_workers(strategy: Any) -> bool:
    # Its class is in a layer above.
    return hasattr(strategy, "parameter_servers")
