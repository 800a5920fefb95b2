"""The one door to TensorFlow's private API.

Nothing else in the library imports from `tensorflow.python`. Each use below says in a line why no public name serves;
`tests/ps_strategy/test_tensorflow_internals.py` fails loudly when one of them changes its meaning.

Two variables of the environment are set here (`prepare_process`) because TensorFlow's C++ reads them there and offers
no other switch.
"""

import contextlib
import gc
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.function.trace_type import default_types
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import cancellation, context, execute, executor
from tensorflow.python.eager.polymorphic_function import atomic_function, concrete_function, function_type_utils
from tensorflow.python.framework import func_graph, ops
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.trackable import resource as trackable_resource

# TensorFlow counts them in 32 bits.
_MOST_SECONDS = 2**31 - 1


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


def update_server_def(server_def: Any, client_timeout: float) -> None:
    """Connects to the tasks that were added or restarted, and lets go of those that are no longer named.

    Args:
      server_def: the `tf.train.ServerDef` that names the tasks.
      client_timeout: a task that is connected to now frees what we make there when it has not heard of us for so many
        seconds. TensorFlow says nothing to such tasks by itself; see `client_lease`.

    Raises:
      tf.errors.OpError: a named task does not answer.
    """
    # Private: nothing public changes the membership without making every variable unreadable.
    context.context().update_server_def(server_def, keep_alive_secs=min(math.ceil(client_timeout), _MOST_SECONDS))


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


@contextlib.contextmanager
def own_executor() -> Iterator[None]:
    """A scope in which the calling thread has an executor of its own, so that an error stays in it and goes with it.

    For threads that have none of their own already.
    """
    # Held until the end: the thread has it for as long.
    bound = bind_executor()
    try:
        yield
    finally:
        bound.clear_error()


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


def present_handle(tensor: Any) -> Any:
    """The handle that the variable of a handle has now; any other tensor itself."""
    owner = owner_of_handle(tensor)
    return variable_handle(owner) if isinstance(owner, tf.Variable) else tensor


def new_handle(variable: Any) -> tf.Tensor:
    """The handle of a new resource, without a value, on the server and of the kind of a variable's present one."""
    # Private: a resource is made, without a value, only by the class of the variables.
    with tf.device(variable.device):
        handle = resource_variable_ops._variable_handle_from_shape_and_dtype(
            variable.shape, variable.dtype, shared_name=None, name=variable.name, graph_mode=False
        )
    handle._handle_data = variable.handle._handle_data
    return handle


def replace_handles(renewed: Iterable[tuple[Any, tf.Tensor]]) -> None:
    """Gives variables other handles, and every function that captured one of the former ones too.

    No function may be running that uses them.

    Args:
      renewed: variables, each with its new handle.
    """
    # Private: that a variable's resource changes is foreseen only while a SavedModel is loaded.
    replacements: dict[int, tuple[Any, tf.Tensor]] = {}
    for variable, handle in renewed:
        former = variable.handle
        handle._parent_trackable = weakref.ref(variable)
        handle._name, handle._unique_id = getattr(former, "_name", None), variable._unique_id
        variable._handle = handle
        # Holds the former one too, so that no other tensor gets its identity meanwhile.
        replacements[id(former)] = former, handle
    graphs, functions = _graphs_and_functions()
    for graph in graphs:
        _replace_captures(graph.function_captures, replacements)
    for function in functions:
        captures = captures_of(function)
        if any(id(capture) in replacements for capture in captures):
            function.set_external_captures(
                [replacements[id(capture)][1] if id(capture) in replacements else capture for capture in captures]
            )


def _graphs_and_functions() -> tuple[list[Any], list[Any]]:
    """Every graph of a function and every concrete function that there is."""
    # TensorFlow keeps no list of them, and they may be anywhere: in a Keras model, a SavedModel, a closure.
    found: tuple[list[Any], list[Any]] = [], []
    kinds: dict[type, list[Any] | None] = {}
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in kinds:
            is_graph, is_function = (
                issubclass(kind, base) for base in (func_graph.FuncGraph, concrete_function.ConcreteFunction)
            )
            kinds[kind] = found[0] if is_graph else found[1] if is_function else None
        things = kinds[kind]
        if things is not None:
            things.append(thing)
    return found


def _replace_captures(captures: Any, replacements: Mapping[int, tuple[Any, tf.Tensor]]) -> None:
    """Replaces what a graph captured, in its order: it is the order of the function's inputs."""
    captured = dict(captures.by_val_external)
    if not any(id(external) in replacements for external in captured.values()):
        return
    for key, external in captured.items():
        _, internal, kind = captures.pop(key)
        former, present = replacements.get(id(external), (None, external))
        captures.add_or_replace(id(present) if key == id(former) else key, present, internal, kind)
    # What is remembered of them is renewed only when it is asked for, and would keep the former resources alive.
    captures.capture_types  # noqa: B018


def captures_of(concrete: Any) -> list[Any]:
    """What a concrete function captured: the same list for as long as that does not change."""
    # Private: `captured_inputs` makes a new list each time, which costs more than the calls of small functions may.
    return concrete._captured_inputs


def attach_initial_value(variable: Any, initial_value: Any) -> None:
    """Keeps with a variable how its initial value is got.

    Kept anywhere else, it would keep the variable alive: a function that makes the initial value of a Keras variable
    refers to that variable.
    """
    # Private: `tf.Variable.initial_value` refuses eager variables.
    variable._coordinator_initial_value = initial_value


def attached_initial_value(variable: Any) -> Any:
    """What `attach_initial_value` kept, or None."""
    # Private: as above.
    return getattr(variable, "_coordinator_initial_value", None)


def forget_last_saved_step(manager: Any) -> None:
    """Lets a `tf.train.CheckpointManager` with a `checkpoint_interval` save at whichever step comes next."""
    # Private: it remembers the step of its last attempt, which may lie ahead once a checkpoint was restored.
    manager._last_checkpoint_step = None


def context_id() -> int:
    """The number by which every server knows what this client makes there; it is one for the process's whole life."""
    # Private: nothing public tells it.
    return int(pywrap_tfe.TFE_GetContextId(context.context()._context_handle)) % 2**64
