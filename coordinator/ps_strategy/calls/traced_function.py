"""A traced function that can run on any worker."""

import concurrent.futures
import contextlib
import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.errors import ClosureCancelledError
from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.fusing.repeated_function import RepeatedFunction
from coordinator.ps_strategy.lone_functions import is_lone
from coordinator.ps_strategy.packed_function import PackedFunction
from coordinator.ps_strategy.per_worker.resource import PerWorkerHandles, PerWorkerResource, WorkerContext

# How long a worker waits for another one to make the call that both need, before it makes its own, in seconds.
_LONGEST_MAKING = 120.0
# How many steps, and which of their inputs they share.
_Repetition = tuple[int, tuple[bool, ...]]


class TracedFunction:
    """A concrete function whose captured per-worker resources are bound when it is called, to the caller's worker.

    Args:
      concrete: a `tf.types.experimental.ConcreteFunction`.
      handles: says which of its captures stand for per-worker resources.

    Attributes:
      token: stands for the function where it must not be kept alive.
    """

    def __init__(self, concrete: Any, handles: PerWorkerHandles) -> None:
        self.token = object()
        self._concrete = concrete
        self._handles = handles
        # What it captured, and what is passed for it; the first changes when parameter servers were recovered.
        self._bound = self._bind()
        # A table of a SavedModel makes its copies itself, so it must not go before the function, as its model may.
        self._repeated: dict[_Repetition, concurrent.futures.Future[RepeatedFunction]] = {}
        self._owners = [tensorflow_internals.owner_of_handle(tensor) for tensor in concrete.captured_inputs]

    @functools.cached_property
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
        inputs = [*self.inputs_on(context, args, kwargs or {}), *self._captures_on(context)]
        return self._run(context, self._packed.for_next_call(), inputs, self._concrete)

    def inputs_on(self, context: WorkerContext, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The tensors that the function is given on a worker for these arguments, its captures left out.

        Raises:
          ClosureInputError: a per-worker resource among them could not be made.
          TypeError: the arguments do not match the function's signature.
        """
        args, kwargs = tf.nest.map_structure(lambda leaf: _own_copy(leaf, context), (tuple(args), dict(kwargs)))
        inputs = tensorflow_internals.flat_inputs(self._concrete, args, kwargs)
        return [_own_copy(self._resource_or_tensor(tensor), context) for tensor in inputs]

    @functools.cached_property
    def may_be_repeated(self) -> bool:
        """Whether it may be copied, and several calls of it be made as one."""
        is_transferable = all(tensor.dtype not in (tf.resource, tf.variant) for tensor in self._concrete.outputs)
        return is_transferable and not is_lone(self._concrete)

    @functools.cached_property
    def _packed(self) -> PackedFunction:
        """What is called when it runs alone."""
        return PackedFunction(self._concrete, may_be_copied=self.may_be_repeated)

    def call_repeatedly(self, context: WorkerContext, steps: Sequence[Sequence[Any]]) -> list[Any]:
        """Runs the function on a worker once for each of `steps`, in order, as one call.

        Args:
          context: the worker.
          steps: for each the `inputs_on` the worker.

        Returns:
          What the function returned for each, on the client: NumPy values, or composite tensors.

        Raises:
          Exception: what `call_on` raises.
        """
        is_shared = tuple(all(value is values[0] for value in values) for values in zip(*steps, strict=True))
        repeated = self._repeated_function(len(steps), is_shared)
        results = repeated.call_on(steps, self._captures_on(context), functools.partial(self._run, context))
        return [tensorflow_internals.packed_outputs(self._concrete, result) for result in results]

    def _repeated_function(self, count: int, is_shared: tuple[bool, ...]) -> RepeatedFunction:
        """One for all workers: they come to need it at about the same time, and making it takes seconds."""
        key = count, is_shared
        made = self._repeated.get(key)
        if made is None:
            mine = concurrent.futures.Future[RepeatedFunction]()
            made = self._repeated.setdefault(key, mine)
            if made is mine:
                self._make_repeated(key, mine)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            return made.result(_LONGEST_MAKING)
        return RepeatedFunction(self._concrete, count, is_shared)

    def _make_repeated(self, key: _Repetition, made: concurrent.futures.Future[RepeatedFunction]) -> None:
        try:
            made.set_result(RepeatedFunction(self._concrete, *key))
        except BaseException as error:  # noqa: BLE001 - raised by whoever asks for the result
            # Others who wait for it have the error too; who comes later tries for himself.
            del self._repeated[key]
            made.set_exception(error)

    def _captures_on(self, context: WorkerContext) -> list[Any]:
        return [_own_copy(capture, context) for capture in self._captures()]

    def _run(self, context: WorkerContext, concrete: Any, inputs: Sequence[Any], stands_for: Any = None) -> Any:
        try:
            with tf.device(context.device):
                return tensorflow_internals.call(concrete, inputs, context.cancellation, stands_for=stands_for)
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


class ResourceBuild:
    """Makes a worker's copy of a resource ahead of its first use, unless the resource was dropped meanwhile."""

    def __init__(self, resource: PerWorkerResource) -> None:
        self._resource = weakref.ref(resource)

    def run_on(self, context: WorkerContext) -> None:
        """Makes the copy."""
        resource = self._resource()
        if resource is not None:
            resource.value_on(context)


def _own_copy(value: Any, context: WorkerContext) -> Any:
    return value.value_on(context) if isinstance(value, PerWorkerResource) else value
