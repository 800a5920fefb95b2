"""The one door to TensorFlow's private API.

Nothing else in the library imports from `tensorflow.python`. Each use below says in a line why no public name serves;
`tests/ps_strategy/test_tensorflow_internals.py` fails loudly when one of them changes its meaning.

Two variables of the environment are set here (`prepare_process`) because TensorFlow's C++ reads them there and offers
no other switch.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.function.trace_type import default_types
from tensorflow.python.eager import cancellation, context, execute, executor
from tensorflow.python.eager.polymorphic_function import atomic_function, function_type_utils
from tensorflow.python.framework import ops
from tensorflow.python.trackable import resource as trackable_resource


def prepare_process() -> None:
    """Sets what the runtime reads from the environment; to be called before the first remote call."""
    # Streaming sends each call without waiting for its answer, so that calls to a dead worker seem to succeed.
    os.environ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"] = "False"
    # Otherwise saving a checkpoint waits for the executors of all workers, dead ones included.
    os.environ["TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY"] = "True"
    # A server that dies while it is called, or while it is being named, must make that fail at once: otherwise it is
    # waited for, by everybody.
    os.environ["GRPC_FAIL_FAST"] = "true"


def current_server_def() -> Any | None:
    """The `tf.train.ServerDef` that this process is connected by, or None."""
    # Private: `tf.config.experimental_connect_to_cluster` sets it, and nothing public tells it.
    return context.get_server_def()


def set_server_def(server_def: Any) -> None:
    """Makes this process a task of a cluster, for the first time in its life.

    Variables made on this process before are lost to it: their device changes its name.
    """
    # Private: the public call adds every task at once and waits for the dead ones.
    context.context().set_server_def(server_def)
    context.ensure_initialized()


def update_server_def(server_def: Any) -> None:
    """Connects to the tasks that were added or restarted, and lets go of those that are no longer named.

    Raises:
      tf.errors.OpError: a named task does not answer.
    """
    # Private: nothing public changes the membership without making every variable unreadable.
    context.context().update_server_def(server_def)


def bind_executor() -> Any:
    """Gives the calling thread an executor of its own, which runs each call before it returns.

    The thread has it for as long as the caller keeps what is returned; then it falls back to the one that all share.
    On that one, the failure of a call poisons what else is under way, on whichever worker, and connecting to a worker
    waits for all of it. Entering `executor_scope` for each call would couple the threads too: leaving it waits for the
    default executor, which waits for handles to be destroyed on every worker, frozen ones too.
    """
    # Private: the public API has no executors.
    bound = executor.new_executor(enable_async=False)
    context.context().executor = bound
    return bound


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


def flat_inputs(concrete: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that a concrete function takes for these arguments, its captures left out.

    Raises:
      TypeError: the arguments do not match the function's signature.
    """
    # Private: calling the function flattens its arguments and calls it with its own captures, in one.
    bound = function_type_utils.canonicalize_function_inputs(tuple(args), dict(kwargs), concrete.function_type)
    return list(concrete.function_type.unpack_inputs(bound))


def call(concrete: Any, inputs: Sequence[Any], manager: CancellationManager) -> Any:
    """Runs a concrete function on the current device, and packs its outputs as the function returned them.

    Args:
      concrete: a `tf.types.experimental.ConcreteFunction`.
      inputs: `flat_inputs`, then one tensor for each of `concrete.captured_inputs`.
      manager: cancels the call.

    Raises:
      tf.errors.OpError: with the place in the user's code, as an ordinary call has it.
    """
    # Private: captures of our choice cannot be given to a public call, and the manager of an ordinary call is read
    # from a global that the threads of all workers would share.
    function = concrete.inference_fn
    ctx = context.context()
    attributes: list[Any] = []
    for name_and_value in ctx.function_call_options.as_attrs().items():
        attributes.extend(name_and_value)
    with atomic_function.InterpolateRuntimeError(function):
        outputs = execute.execute_with_cancellation(
            function.name.decode("utf-8"),
            num_outputs=len(function.function_type.flat_outputs),
            inputs=list(inputs),
            attrs=tuple(attributes),
            ctx=ctx,
            cancellation_manager=manager._manager,
        )
    return function.function_type.pack_output(outputs or None)


def resource_creator_scope(kind: str, creator: Callable[..., Any]) -> Any:
    """A scope in which lookup tables of a kind are made by `creator(next_creator, *args, **kwargs)`."""
    # Private: the hook of `tf.distribute.StrategyExtended` for it has no public counterpart.
    return ops.resource_creator_scope(kind, creator)


def is_restored_resource(table: Any) -> bool:
    """Whether a table came from a SavedModel, so that saved functions create and fill it."""
    # Private: loaded tables have no public class.
    return isinstance(table, trackable_resource.RestoredResource)


def restored_functions(table: Any) -> tuple[Any, Any]:
    """The concrete functions that create and fill a table that came from a SavedModel."""
    # Private: SavedModel stores them under these names.
    create, initialize = table._create_resource, table._initialize
    return create.concrete_functions[0], initialize.concrete_functions[0]


def variable_handle(variable: Any) -> tf.Tensor:
    """The resource handle of a variable, eager."""
    # Private: `tf.Variable.handle` is public on its resource subclass alone, which has no public name.
    return variable.handle


def owner_of_handle(tensor: Any) -> Any | None:
    """The lookup table or variable that a resource handle belongs to, or None."""
    # Private: a function's captures are handles, and nothing public leads from one to its object.
    owner = getattr(tensor, "_parent_trackable", None)
    return owner() if owner is not None else None
