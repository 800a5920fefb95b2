"""A traced function that can run on any worker, and one call of it."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.errors import ClosureCancelledError
from coordinator.future import Future
from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.per_worker_resource import PerWorkerHandles, PerWorkerResource, WorkerContext


class TracedFunction:
    """A concrete function whose captured per-worker resources are bound when it is called, to the caller's worker.

    Args:
      concrete: a `tf.types.experimental.ConcreteFunction`.
      handles: says which of its captures stand for per-worker resources.
    """

    def __init__(self, concrete: Any, handles: PerWorkerHandles) -> None:
        self._concrete = concrete
        self._handles = handles
        # What it captured, and what is passed for it; the first changes when parameter servers were recovered.
        self._bound = self._bind()
        # A table of a SavedModel makes its copies itself, so it must not go before the function, as its model may.
        self._owners = [tensorflow_internals.owner_of_handle(tensor) for tensor in concrete.captured_inputs]

    @property
    def name(self) -> str:
        """The name of the Python function that it was traced from."""
        return str(self._concrete.graph.name)

    @property
    def structured_outputs(self) -> Any:
        """What the function returns, as symbolic values."""
        return self._concrete.structured_outputs

    @property
    def result_spec(self) -> Any:
        """What the function returns, as `tf.TypeSpec`s: what a function that takes its result is traced with."""

        def spec(value: Any) -> Any:
            return value if value is None or isinstance(value, tf.TypeSpec) else tf.type_spec_from_value(value)

        return tf.nest.map_structure(spec, self.structured_outputs)

    def was_traced_with(self, handles: PerWorkerHandles) -> bool:
        """Whether it was traced for the strategy that these handles are of."""
        return self._handles is handles

    @property
    def uses_client_dataset(self) -> bool:
        """Whether it uses a dataset that was made outside of it, which stays on the client."""
        return any(tensor.dtype == tf.variant for tensor in self._concrete.captured_inputs)

    def call_on(self, context: WorkerContext, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Runs the function on a worker; what it returns stays there.

        Raises:
          ClosureInputError: a per-worker resource that it uses could not be made.
          ClosureCancelledError: the call was cancelled.
          tf.errors.OpError: it failed.
        """
        args, kwargs = tf.nest.map_structure(lambda leaf: _own_copy(leaf, context), (tuple(args), dict(kwargs or {})))
        inputs = tensorflow_internals.flat_inputs(self._concrete, args, kwargs)
        inputs = [_own_copy(self._resource_or_tensor(tensor), context) for tensor in inputs]
        inputs += [_own_copy(capture, context) for capture in self._captures()]
        try:
            with tf.device(context.device):
                return tensorflow_internals.call(self._concrete, inputs, context.cancellation)
        except tf.errors.OpError as error:
            # A cancelled call may report any error: TensorFlow often passes on that of the call for whose sake it was
            # cancelled.
            if context.cancellation.is_cancelled:
                raise ClosureCancelledError("The call was cancelled.") from error
            raise

    def _captures(self) -> list[Any]:
        """What is passed for its captures: per-worker resources, and the present handles of variables."""
        captured, passed = self._bound
        if captured is not tensorflow_internals.captures_of(self._concrete):
            self._bound = captured, passed = self._bind()
        return passed

    def _bind(self) -> tuple[list[Any], list[Any]]:
        captured = tensorflow_internals.captures_of(self._concrete)
        # What was captured may be a former handle, if its variable was renewed while the function was traced.
        present = map(tensorflow_internals.present_handle, self._concrete.captured_inputs)
        return captured, [self._resource_or_tensor(tensor) for tensor in present]

    def _resource_or_tensor(self, tensor: Any) -> Any:
        return self._handles.resource_for(tensor) or tensor


class ScheduledCall:
    """One scheduled call: what the runtime runs for a closure.

    Args:
      function: the function.
      args: its positional arguments, per-worker resources among them.
      kwargs: its keyword arguments.
      takes_futures: whether futures are among them, which are done by the time that it runs.
    """

    def __init__(
        self, function: TracedFunction, args: Sequence[Any], kwargs: Mapping[str, Any], *, takes_futures: bool = False
    ) -> None:
        self._takes_futures = takes_futures
        self._function = function
        self._args = args
        self._kwargs = kwargs

    def run_on(self, context: WorkerContext) -> Any:
        """Runs it and brings its result to the client, so that it outlives the worker."""
        args, kwargs = self._args, self._kwargs
        if self._takes_futures:
            args, kwargs = tf.nest.map_structure(_result_of_future, (tuple(args), dict(kwargs)))
        outputs = self._function.call_on(context, args, kwargs)
        return tf.nest.map_structure(_on_client, outputs)


class ResourceBuild:
    """Makes a worker's copy of a resource ahead of its first use, unless the resource was dropped meanwhile."""

    def __init__(self, resource: PerWorkerResource) -> None:
        self._resource = weakref.ref(resource)

    def run_on(self, context: WorkerContext) -> None:
        """Makes the copy."""
        resource = self._resource()
        if resource is not None:
            resource.value_on(context)


def _result_of_future(leaf: Any) -> Any:
    return leaf.result(timeout=0) if isinstance(leaf, Future) else leaf


def _own_copy(value: Any, context: WorkerContext) -> Any:
    return value.value_on(context) if isinstance(value, PerWorkerResource) else value


def _on_client(value: Any) -> Any:
    """NumPy values for a tensor; a ragged, sparse or other composite tensor as itself, on the client."""
    if isinstance(value, tf.Tensor):
        return value.numpy()
    return tf.nest.map_structure(
        lambda part: tf.constant(part.numpy()) if isinstance(part, tf.Tensor) else part, value, expand_composites=True
    )
