"""Concrete functions: what they take, what they captured, and calls of them that can be cancelled."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.function.trace_type import default_types
from tensorflow.python.eager import cancellation, context, execute
from tensorflow.python.eager.polymorphic_function import atomic_function, function_type_utils
from tensorflow.python.framework.composite_tensor import CompositeTensor
from tensorflow.python.saved_model import function_deserialization


class CancellationManager:
    """Cancels the calls that were started with it."""

    def __init__(self) -> None:
        # Private: the public API cannot cancel an eager call.
        self._manager = cancellation.CancellationManager()

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return bool(self._manager.is_cancelled)

    def cancel(self) -> None:
        """Cancels those calls; again, does nothing."""
        self._manager.start_cancel()


def with_defaults(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, together with those that were left out.

    For a `tf.function` these are its defaults, for a concrete function the Python values that it was traced with.

    Raises:
      TypeError: the arguments do not match the function's signature.
    """
    # Private: nothing public tells them, and what a function was traced into does not know its defaults.
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
    """The arguments that a `tf.function` is given in a call, by the names of its parameters.

    Raises:
      TypeError: the arguments do not match the function's signature.
    """
    # Private: the public signature of the Python function has the object of a method among its parameters.
    return dict(function.function_type.bind_partial(*args, **kwargs).arguments)


def flat_inputs(concrete: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that a concrete function takes for these arguments, its captures left out.

    Raises:
      TypeError: the arguments do not match the function's signature.
    """
    # Private: calling the function flattens its arguments and calls it with its own captures, in one.
    bound = function_type_utils.canonicalize_function_inputs(tuple(args), dict(kwargs), concrete.function_type)
    return list(concrete.function_type.unpack_inputs(bound))


def call(concrete: Any, inputs: Sequence[Any], manager: CancellationManager, *, stands_for: Any = None) -> Any:
    """Runs a concrete function on the current device, and packs its outputs as the function returned them.

    Args:
      concrete: a `tf.types.experimental.ConcreteFunction`.
      inputs: `flat_inputs`, then one tensor for each of `concrete.captured_inputs`.
      manager: cancels the call.
      stands_for: the concrete function in whose place it is run, and to the caller that one; its operations have the
        same names, and its flat outputs are the same. None is itself, as that one may be.

    Raises:
      tf.errors.OpError: with the place in the user's code, as an ordinary call has it.
    """
    # Private: captures of our choice cannot be given to a public call, and the manager of an ordinary call is read
    # from a global that the threads of all workers would share.
    function = concrete.inference_fn
    told = function if stands_for in (None, concrete) else _Told(function.name, stands_for.inference_fn)
    ctx = context.context()
    attributes: list[Any] = []
    for name_and_value in ctx.function_call_options.as_attrs().items():
        attributes.extend(name_and_value)
    with atomic_function.InterpolateRuntimeError(told):
        outputs = execute.execute_with_cancellation(
            function.name.decode("utf-8"),
            num_outputs=len(function.function_type.flat_outputs),
            inputs=list(inputs),
            attrs=tuple(attributes),
            ctx=ctx,
            cancellation_manager=manager._manager,
        )
    return told.function_type.pack_output(outputs or None)


class _Told:
    """What errors and results of a function are told by, if it is run in the place of another one."""

    def __init__(self, name: bytes, other: Any) -> None:
        self.name = name
        self.children = other.children
        self.function_type = other.function_type
        self._other = other

    @property
    def graph_debug_info(self) -> Any:
        """Where its operations were made; it takes long to get."""
        return self._other.graph_debug_info


def packed_outputs(concrete: Any, values: Sequence[Any]) -> Any:
    """What a concrete function returned, in its structure.

    Args:
      concrete: a `tf.types.experimental.ConcreteFunction`.
      values: NumPy values, one for each of `concrete.outputs`.

    Returns:
      Its structure of these values; composite tensors are made of them.
    """
    # Private: nothing public packs what a function returned before its own call does.
    if any(isinstance(leaf, CompositeTensor) for leaf in tf.nest.flatten(concrete.structured_outputs)):
        values = [tf.constant(value, output.dtype) for value, output in zip(values, concrete.outputs, strict=True)]
    return concrete.function_type.pack_output(values)


def captures_of(concrete: Any) -> list[Any]:
    """What a concrete function captured: the same list for as long as that does not change."""
    # Private: `captured_inputs` makes a new list each time, which costs more than the calls of small functions may.
    return concrete._captured_inputs


def fresh(function: Any) -> Any:
    """The same `tf.function`, not traced yet; one of a SavedModel, which cannot be traced anew, itself."""
    # Private: nothing public tells where a function is from, nor copies one with its settings.
    return function if isinstance(function, function_deserialization.RestoredFunction) else function._clone(None)
