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

# What a call raises if a worker, or a connection between two servers, is lost.
BROKEN_CONNECTION = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)


class PreparedFunction:
    """One function with a gate, see `gated_function`. Every method may be called from any thread.

    Args:
      name: for messages.
      build: builds it; returns an object with the `concrete` function, or None if there is nothing to build.

    Attributes:
      built: what `build` has returned; None until then.
      seconds: how long it took to build it and to prepare it on a worker.
    """

    def __init__(self, name: str, build: Callable[[], Any]) -> None:
        self.built: Any = None
        self.seconds = 0.0
        self._name = name
        self._build = build
        # A leaf; guards what follows.
        self._lock = threading.Lock()
        self._is_over = False
        # The workers for which it is being built or prepared.
        self._wanted: set[int] = set()
        # By worker: the connection with which it was prepared there, and the captures of then, which are others after a
        # recovery of parameter servers.
        self._ready: dict[int, tuple[int, Any]] = {}
        self._inputs: dict[int, Sequence[Any]] = {}

    def is_ready_on(self, worker: int, connection: int, captures: Any) -> bool:
        """Returns whether a worker has prepared it."""
        known = self._ready.get(worker)
        return known is not None and known[0] == connection and known[1] is captures

    def is_wanted_on(self, worker: int) -> bool:
        """Returns whether it is being built or prepared for a worker."""
        return worker in self._wanted or (self._is_over and self.built is None)

    def want(self, worker: int, builds: Builds, inputs: Sequence[Any], prepare: Callable[[WorkerContext], Any]) -> None:
        """Has it built and prepared on a worker, unless that is being done.

        Args:
          worker: its index.
          builds: do so.
          inputs: of the types and on the devices of those that it will be called with, without captures: tensors, or
            types of values on the client.
          prepare: calls `prepare_on` on the worker; it must not keep this object alive.
        """
        with self._lock:
            if self.is_wanted_on(worker):
                return
            self._wanted.add(worker)
            # Values are not kept, nor iterators kept alive, each of which is on one worker.
            self._inputs[worker] = [_reference(each) for each in inputs]
            is_built = self._is_over
        end = functools.partial(_end, weakref.ref(self), worker)
        preparation = Preparation(worker, prepare, f"prepare {self._name}", end)
        if is_built:
            builds.prepare(preparation)
        else:
            # The first request builds it.
            builds.request(_Build(weakref.ref(self), builds, preparation))

    def build_now(self) -> bool:
        """Builds it, if it was not built before; returns whether it could be. For the builder's thread."""
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
        """Prepares it on a worker.

        Args:
          context: the worker.
          captures: the present captures of the function, by identity.
          passed: what is passed for them on this worker.

        Raises:
          tf.errors.OpError: the worker is lost.
        """
        began = time.monotonic()
        try:
            inputs = [_present(each) for each in self._inputs.pop(context.index)]
            if any(each is None for each in inputs):
                return
            with tf.device(context.calling_device):
                call_concrete(self.built.concrete, [*inputs, *passed, context.go(False)], context.cancellation)
        except BROKEN_CONNECTION:
            raise
        except tf.errors.OpError as error:
            # Its gate was closed. Or an operation without effects did not like the values: it is prepared all the same.
            forget_error()
            _logger.debug("%s is prepared on worker %d.", self._name, context.index, exc_info=error)
            self._ready[context.index] = context.connection_number, captures
            if not self._ready.keys() - {context.index}:
                self.seconds += time.monotonic() - began

    def end_on(self, worker: int) -> None:
        """Notes that nothing is prepared on a worker any more."""
        with self._lock:
            self._wanted.discard(worker)


class _Build:
    """A request to build a function, and to prepare it on one worker then.

    Args:
      function: refers weakly to it.
      builds: has it prepared.
      preparation: prepares it.
    """

    def __init__(self, function: "weakref.ref[PreparedFunction]", builds: Builds, preparation: Preparation) -> None:
        self._function = function
        self._builds = builds
        self._preparation = preparation

    def __call__(self) -> None:
        """Builds it, on the builder's thread."""
        function = self._function()
        if function is not None and function.build_now():
            self._builds.prepare(self._preparation)


def _end(function: "weakref.ref[PreparedFunction]", worker: int) -> None:
    if (present := function()) is not None:
        present.end_on(worker)


def _reference(tensor: Any) -> Any:
    """Returns what stands for an input: its type, or a weak reference if it is no value of the client."""
    if isinstance(tensor, tf.TensorSpec):
        return tensor
    if tensor.dtype in (tf.resource, tf.variant) or not is_on_client(tensor.device):
        return weakref.ref(tensor)
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _present(reference: Any) -> Any:
    """Returns an input, whose value does not matter; None if it does not exist any more."""
    if isinstance(reference, tf.TensorSpec):
        with tf.device(None), tf.device("/device:CPU:0"):
            return tf.zeros(reference.shape, reference.dtype)
    return reference()
