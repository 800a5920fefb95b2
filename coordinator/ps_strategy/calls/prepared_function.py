"""A function that is built in the background, and prepared on each worker before a closure needs it there.

want --> build (builder's thread) --> built --> prepare (an internal closure of each worker) --> ready there
  ^                                     |                                                          |
  |                                     '-- cannot be built: never ready                           |
  '------------- the worker was reconnected, or parameter servers were recovered ------------------'
"""

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.fusing.repeated_function import is_on_client
from coordinator.ps_strategy.per_worker.resource import WorkerContext
from coordinator.ps_strategy.tensorflow_internals.functions import call_concrete
from coordinator.ps_strategy.tensorflow_internals.process import forget_error, own_executor
from coordinator.runtime import Builds, Preparation

_logger = logging.getLogger("coordinator")

# Raised by a call if a worker, or a connection between two servers, is lost.
BROKEN_CONNECTION = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)


class PreparedFunction:
    """One function with a gate, see `gated_function`. Any thread may call every method.

    `build` returns an object with the `concrete` function, or None if there is nothing to build.

    Attributes:
      built: the result of `build`; None until then.
      seconds: the time to build it and to prepare it on a first worker.
    """

    def __init__(self, name: str, build: Callable[[], Any]) -> None:
        self.built: Any = None
        self.seconds = 0.0
        self._name = name
        self._build = build
        # A leaf; guards what follows.
        self._lock = threading.Lock()
        # Whether `build` has ended.
        self._is_over = False
        # The workers for which the function is being built or prepared.
        self._wanted: set[int] = set()
        # By worker: the number of the connection at the preparation, and the captures; a recovery of parameter servers
        # replaces the captures.
        self._ready: dict[int, tuple[int, Any]] = {}
        self._inputs: dict[int, Sequence[Any]] = {}

    def is_ready_on(self, worker: int, connection: int, captures: Any) -> bool:
        """Returns whether a worker has prepared it."""
        known = self._ready.get(worker)
        return known is not None and known[0] == connection and known[1] is captures

    def is_wanted_on(self, worker: int) -> bool:
        """Returns whether it is being built or prepared for a worker, or can never be built."""
        return worker in self._wanted or (self._is_over and self.built is None)

    def want(self, worker: int, builds: Builds, inputs: Sequence[Any], prepare: Callable[[WorkerContext], Any]) -> None:
        """Has it built and prepared on a worker, unless that is under way.

        Args:
          worker: its index.
          builds: builds and prepares it.
          inputs: tensors of the types and on the devices of later calls, without captures; types for client values.
          prepare: calls `prepare_on` on the worker; it must not keep this object alive.
        """
        with self._lock:
            if self.is_wanted_on(worker):
                return
            self._wanted.add(worker)
            # Values are not kept. Iterators, each on one worker, are referred to weakly.
            self._inputs[worker] = [*map(_reference, inputs)]
            is_built = self._is_over
        reference = weakref.ref(self)
        end = functools.partial(_end, reference, worker)
        preparation = Preparation(worker, prepare, f"prepare {self._name}", end)
        if is_built:
            builds.prepare(preparation)
        else:
            builds.request(functools.partial(_build, reference, builds, preparation))

    def build_now(self) -> bool:
        """Builds it if `build` was not called yet; returns whether it is built. Called by the builder's thread."""
        if not self._is_over:
            began = time.monotonic()
            try:
                with own_executor():
                    self.built = self._build()
            except Exception:
                _logger.warning("%s could not be built; the function runs as before.", self._name, exc_info=True)
            self.seconds += time.monotonic() - began
            self._is_over = True
        return self.built is not None

    def prepare_on(self, context: WorkerContext, captures: Any, passed: Sequence[Any]) -> None:
        """Prepares it on a worker, where `passed` is passed for the present `captures`. OpError: the worker is lost."""
        began = time.monotonic()
        try:
            inputs = [*map(_present, self._inputs.pop(context.index))]
            if any(value is None for value in inputs):
                return
            with tf.device(context.calling_device):
                call_concrete(self.built.concrete, [*inputs, *passed, context.go(False)], context.cancellation)
        except BROKEN_CONNECTION:
            raise
        except tf.errors.OpError as error:
            # The gate was closed. Or an operation without effects has refused the values: it is prepared nevertheless.
            forget_error()
            _logger.debug("%s is prepared on worker %d.", self._name, context.index, exc_info=error)
            self._ready[context.index] = context.connection_number, captures
            if not self._ready.keys() - {context.index}:
                self.seconds += time.monotonic() - began

    def end_on(self, worker: int) -> None:
        """Notes that the preparation on a worker has ended."""
        with self._lock:
            self._wanted.discard(worker)


# Requests to build or prepare refer weakly to the function.


def _build(reference: "weakref.ref[PreparedFunction]", builds: Builds, preparation: Preparation) -> None:
    function = reference()
    if function is not None and function.build_now():
        builds.prepare(preparation)


def _end(reference: "weakref.ref[PreparedFunction]", worker: int) -> None:
    if (function := reference()) is not None:
        function.end_on(worker)


def _reference(tensor: Any) -> Any:
    """Returns the type of an input, or a weak reference to a value that is not on the client."""
    if isinstance(tensor, tf.TensorSpec):
        return tensor
    if tensor.dtype in (tf.resource, tf.variant) or not is_on_client(tensor.device):
        return weakref.ref(tensor)
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _present(reference: Any) -> Any:
    """Returns an input of the type, its value does not matter; or the referenced value, None if it is gone."""
    if isinstance(reference, tf.TensorSpec):
        with tf.device(None), tf.device("/device:CPU:0"):
            return tf.zeros(reference.shape, reference.dtype)
    return reference()
