"""Concrete functions: their inputs and captures, and calls of them that can be cancelled."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import tensorflow as tf
from tensorflow.core.function.trace_type import default_types
from tensorflow.python.distribute.coordinator import coordinator_context
from tensorflow.python.eager import cancellation, context, execute
from tensorflow.python.eager.polymorphic_function import atomic_function, function_type_utils
from tensorflow.python.framework.composite_tensor import CompositeTensor
from tensorflow.python.saved_model import function_deserialization


class CancellationManager:
    """Cancels the calls that it was passed to."""

    def __init__(self) -> None:
        # Private: the public API cannot cancel an eager call.
        self._manager = cancellation.CancellationManager()

    @property
    def is_cancelled(self) -> bool:
        """True after `cancel`."""
        return bool(self._manager.is_cancelled)

    def cancel(self) -> None:
        """Cancels the calls. Later calls of this method have no effect."""
        self._manager.start_cancel()


def with_defaults(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call, completed by those that were left out.

    These are the defaults of a `tf.function`, or the Python values that a concrete function was traced with.

    Raises:
      TypeError: the arguments do not match the function's signature.
    """
    # Private: nothing public returns them, and a concrete function does not know the defaults.
    signature = function.function_type
    if isinstance(function, tf.types.experimental.ConcreteFunction):
        types = {name: parameter.type_constraint for name, parameter in signature.parameters.items()}
        left_out = {name: kind.value for name, kind in types.items() if isinstance(kind, default_types.Literal)}
    else:
        left_out = function.function_spec.default_values
    bound = signature.bind_partial(*args, **kwargs)
    bound.arguments = {**left_out, **bound.arguments}
    return bound.args, bound.kwargs


def named_arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of a `tf.function`, by the names of its parameters.

    Raises:
      TypeError: the arguments do not match the function's signature.
    """
    # Private: the public signature of the Python function has the object of a method among its parameters.
    return dict(function.function_type.bind_partial(*args, **kwargs).arguments)


def flat_inputs(concrete: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the tensors that a concrete function takes for these arguments, without its captures.

    Raises:
      TypeError: the arguments do not match the function's signature.
    """
    # Private: the public call flattens the arguments and adds the function's own captures in one step.
    bound = function_type_utils.canonicalize_function_inputs(tuple(args), dict(kwargs), concrete.function_type)
    return list(concrete.function_type.unpack_inputs(bound))


def call_concrete(concrete: Any, inputs: Sequence[Any], manager: CancellationManager, *, stands_for: Any = None) -> Any:
    """Runs a concrete function on the current device.

    Args:
      concrete: a `tf.types.experimental.ConcreteFunction`.
      inputs: `flat_inputs`, then one tensor for each of `captured_inputs`.
      manager: cancels the call.
      stands_for: the concrete function that this one replaces, which errors refer to; it has the same operation names
        and flat outputs. None if it replaces no other.

    Returns:
      The outputs in the structure of the (replaced) function.

    Raises:
      tf.errors.OpError: with the location in the user's code, as in an ordinary call.
    """
    # Private: a public call takes neither captures nor a cancellation manager of the caller's choice; it reads the
    # manager from a global that the threads of all workers share.
    function = concrete.inference_fn
    reported = function if stands_for in (None, concrete) else _ReportedAs(function.name, stands_for.inference_fn)
    ctx = context.context()
    attributes: list[Any] = []
    for name_and_value in ctx.function_call_options.as_attrs().items():
        attributes.extend(name_and_value)
    with atomic_function.InterpolateRuntimeError(reported):
        outputs = execute.execute_with_cancellation(
            function.name.decode("utf-8"),
            num_outputs=len(function.function_type.flat_outputs),
            inputs=list(inputs),
            attrs=tuple(attributes),
            ctx=ctx,
            cancellation_manager=manager._manager,
        )
    return reported.function_type.pack_output(outputs or None)


class _ReportedAs:
    """A function under its own name whose errors and results are those of the function that it replaces."""

    def __init__(self, name: bytes, other: Any) -> None:
        self.name = name
        self.children = other.children
        self.function_type = other.function_type
        self._other = other

    @property
    def graph_debug_info(self) -> Any:
        """Where its operations were created; slow to compute."""
        return self._other.graph_debug_info


def structure_outputs(concrete: Any, values: Sequence[Any]) -> Any:
    """Returns flat outputs of a concrete function in the structure that it returns.

    Args:
      concrete: a `tf.types.experimental.ConcreteFunction`.
      values: NumPy values, one for each of `concrete.outputs`.

    Returns:
      The values in its structure, with composite tensors where it returns some.
    """
    # Private: only the function's own call does this publicly.
    if any(isinstance(leaf, CompositeTensor) for leaf in tf.nest.flatten(concrete.structured_outputs)):
        values = [tf.constant(value, output.dtype) for value, output in zip(values, concrete.outputs, strict=True)]
    return concrete.function_type.pack_output(values)


def captures_of(concrete: Any) -> list[Any]:
    """Returns the captures of a concrete function: the same list object as long as they do not change."""
    # Private: `captured_inputs` creates a new list each time, which is too slow for calls of small functions.
    return concrete._captured_inputs


def captured_inputs(concrete: Any, worker_index: Any = 0) -> list[Any]:
    """Returns what a concrete function captured: one tensor for each input that is no argument.

    Args:
      concrete: a `tf.types.experimental.ConcreteFunction`.
      worker_index: returned where the function reads the index of its worker, by
        `tf.distribute.coordinator.experimental_get_current_worker_index()`: a tensor of type int64, or an int.
    """
    # Private: that function captures the index when it is called, from a context of TensorFlow's own coordinator.
    of_thread = coordinator_context._dispatch_context
    former = coordinator_context.get_current_dispatch_context()
    of_thread.current = coordinator_context.DispatchContext(SimpleNamespace(worker_index=worker_index))
    try:
        return list(concrete.captured_inputs)
    finally:
        of_thread.current = former


def untraced_copy(function: Any) -> Any | None:
    """Returns a copy of a `tf.function` without its traces; None for one of a SavedModel, which cannot be retraced."""
    # Private: there is no public way to copy a function with its settings, or to see that a SavedModel holds it.
    return None if isinstance(function, function_deserialization.RestoredFunction) else function._clone(None)
