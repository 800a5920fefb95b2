"""Handles of variables and tables: what functions capture, and what a recovery replaces."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.framework import func_graph, ops
from tensorflow.python.ops import handle_data_util, resource_variable_ops
from tensorflow.python.trackable import resource as trackable_resource

from coordinator.ps_strategy.tensorflow_internals.calls import captures_of
from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced

# Attributes of a checkpoint: its asynchronous checkpointer, once it was needed, and the method that creates it.
_ASYNCHRONOUS, _MAKES_ASYNCHRONOUS = "_async_checkpointer_impl", "_async_checkpointer"


def resource_creator_scope(kind: str, creator: Callable[..., Any]) -> Any:
    """A scope in which lookup tables of a kind are created by `creator(next_creator, *args, **kwargs)`."""

    def create(*args: Any, **kwargs: Any) -> Any:
        return creator(*args, **kwargs)

    # Private: the hook of `tf.distribute.StrategyExtended` for it has no public counterpart. A function, since
    # TensorFlow makes deep copies of the creators, which would copy the object of a method.
    return ops.resource_creator_scope(kind, create)


def is_restored_resource(table: Any) -> bool:
    """Returns True if a table came from a SavedModel, so that saved functions create and fill it."""
    # Private: loaded tables have no public class.
    return isinstance(table, trackable_resource.RestoredResource)


def restored_functions(table: Any) -> tuple[Any, Any]:
    """Returns the concrete functions that create and fill a table from a SavedModel."""
    # Private: SavedModel stores them under these names.
    create, initialize = table._create_resource, table._initialize
    return create.concrete_functions[0], initialize.concrete_functions[0]


def forget_last_saved_step(manager: Any) -> None:
    """Makes a `tf.train.CheckpointManager` with a `checkpoint_interval` save at the next step."""
    # Private: it remembers the step of its last attempt, which may lie ahead once a checkpoint was restored.
    manager._last_checkpoint_step = None


def saves_asynchronously(checkpoint: Any) -> bool:
    """Returns True if a `tf.train.Checkpoint` was saved or restored with `enable_async`, which then stays on."""
    # Private: no public attribute says so.
    return getattr(checkpoint, _ASYNCHRONOUS, None) is not None


@contextlib.contextmanager
def asynchronous_saves_refused(checkpoint: Any, error: Callable[[], Exception]) -> Iterator[None]:
    """A scope in which a `tf.train.Checkpoint` raises `error()` when it is saved or restored with `enable_async`."""

    def refuse() -> None:
        # It is set before this is called, and would make the next restore without options an asynchronous one.
        checkpoint._checkpoint_options = None
        raise error()

    # Private: all ways to save call this method. Set in `vars` to bypass the checkpoint's tracking of attributes.
    vars(checkpoint)[_MAKES_ASYNCHRONOUS] = refuse
    try:
        yield
    finally:
        vars(checkpoint).pop(_MAKES_ASYNCHRONOUS, None)


def is_on_parameter_server(tensor: Any) -> bool:
    """Returns True if a captured tensor is the handle of a resource on a parameter server."""
    is_resource = tensor.dtype == tf.resource and not tf.is_symbolic_tensor(tensor)
    return is_resource and tf.DeviceSpec.from_string(tensor.device).job == "ps"


def owner_of_handle(tensor: Any) -> Any | None:
    """Returns the lookup table or variable that a resource handle belongs to, or None."""
    # Private: a function's captures are handles, and nothing public leads from one to its object.
    owner = getattr(tensor, "_parent_trackable", None)
    return owner() if owner is not None else None


def present_handle(tensor: Any) -> Any:
    """Returns the current handle of the variable or table that a handle belongs to; any other tensor unchanged."""
    owner = owner_of_handle(tensor)
    return tensor if owner is None else _handle_of(owner)


def _handle_of(owner: Any) -> tf.Tensor:
    return owner.handle if isinstance(owner, tf.Variable) else owner.resource_handle


class _TolerantDeleter(resource_variable_ops.EagerResourceDeleter):
    """Frees a resource, if its server still has it."""

    __slots__ = ()

    def __del__(self) -> None:
        with contextlib.suppress(tf.errors.OpError):
            super().__del__()


def free_if_present(queue: Any) -> None:
    """Has a queue free its resource without a complaint if the server has lost it by then."""
    # Private: what frees it raises an error where nothing can catch it.
    queue._resource_deleter.__class__ = _TolerantDeleter


def copy_handle_data(source: Any, target: Any) -> None:
    """Copies the shape and type of a handle's resource to a symbolic handle."""
    # Private: `tf.TensorSpec` of a handle does not have them.
    handle_data_util.copy_handle_data(source, target)


def variable_of(handle: Any) -> tf.TensorSpec | None:
    """Returns the shape and type of the variable of a symbolic handle; None if they are not known."""
    # Private: only a `tf.Variable` tells them publicly.
    known = resource_variable_ops.get_eager_safe_handle_data(handle) if handle.dtype == tf.resource else None
    if known is None or not known.is_set or len(known.shape_and_type) != 1:
        return None
    spec = tf.TensorSpec(known.shape_and_type[0].shape, known.shape_and_type[0].dtype)
    return spec if spec.shape.is_fully_defined() else None


def new_handle(variable: Any) -> tf.Tensor:
    """Returns the handle of a new resource without a value, on the variable's server and of its type."""
    # Private: publicly, a resource is created only together with a variable and its value.
    with tf.device(variable.device):
        handle = resource_variable_ops._variable_handle_from_shape_and_dtype(
            variable.shape, variable.dtype, shared_name=None, name=variable.name, graph_mode=False
        )
    handle._handle_data = variable.handle._handle_data
    return handle


class TracedFunctions:
    """Refers weakly to the graphs and the concrete functions that were made while they were recorded.

    These are the only ones that can have captured the handle of a variable or table of the strategy that records them.
    They may be anywhere: in a Keras model, a SavedModel, a closure.
    """

    def __init__(self) -> None:
        # By identity. The references are copied in one step, since other threads may trace at the same time.
        self._graphs: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._functions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    @contextlib.contextmanager
    def recorded(self) -> Iterator["TracedFunctions"]:
        """A scope in which each graph and concrete function of this process is recorded."""
        # Private: TensorFlow has no list of its functions. To search Python's objects for them would find none that
        # `gc.freeze` has hidden, and take seconds in a large program.
        with contextlib.ExitStack() as patches:
            for kind, made in (
                (func_graph.FuncGraph, self._graphs),
                (concrete_function.ConcreteFunction, self._functions),
            ):
                patches.enter_context(attribute_replaced(kind, "__init__", _recording(kind.__init__, made)))
            yield self

    def graphs(self) -> list[Any]:
        """Returns the graphs that are alive."""
        return [graph for reference in self._graphs.valuerefs() if (graph := reference()) is not None]

    def functions(self) -> list[Any]:
        """Returns the concrete functions that are alive."""
        return [function for reference in self._functions.valuerefs() if (function := reference()) is not None]


def _recording(construct: Callable[..., None], made: "weakref.WeakValueDictionary[int, Any]") -> Callable[..., None]:
    """Returns a constructor that adds what it constructs to `made`."""

    @functools.wraps(construct)
    def construct_and_record(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        made[id(self)] = self

    return construct_and_record


def replace_handles(renewed: Iterable[tuple[Any, tf.Tensor]], traced: TracedFunctions) -> None:
    """Replaces the handles of variables and tables, also in every function that captured one.

    No function that uses them may be running.

    Args:
      renewed: variables and tables, each with its new handle.
      traced: has every function that may have captured one.
    """
    replacements: dict[int, tuple[Any, tf.Tensor]] = {}
    for owner, handle in renewed:
        former = _handle_of(owner)
        _set_handle(owner, handle)
        # Keeps the former handle alive, so that no other tensor gets its id.
        replacements[id(former)] = former, handle
    for graph in traced.graphs():
        _replace_captures(graph.function_captures, replacements)
    for function in traced.functions():
        captures = captures_of(function)
        if any(id(capture) in replacements for capture in captures):
            function.set_external_captures(
                [replacements[id(capture)][1] if id(capture) in replacements else capture for capture in captures]
            )


def forget_handles(owners: Iterable[Any]) -> None:
    """Gives variables and tables handles of nothing, in this process, with which each operation raises an error.

    After TensorFlow was reset, an operation with a former handle, of a resource on a server, would end the process.
    """
    with tf.device("/device:CPU:0"):
        for owner in owners:
            dtype, shape = getattr(owner, "dtype", tf.float32), getattr(owner, "shape", [])
            # By a name: a variable without one would exist, and be read as an empty tensor.
            name = f"{owner.name}, which was deleted with its strategy"
            handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name)
            copy_handle_data(_handle_of(owner), handle)
            _set_handle(owner, handle)


def _set_handle(owner: Any, handle: Any) -> None:
    # Private: TensorFlow changes the resource of a variable or table only while it loads a SavedModel.
    if not isinstance(owner, tf.Variable):
        owner._resource_handle = handle
        return
    handle._parent_trackable = weakref.ref(owner)
    handle._name, handle._unique_id = getattr(owner.handle, "_name", None), owner._unique_id
    owner._handle = handle


def _replace_captures(captures: Any, replacements: Mapping[int, tuple[Any, tf.Tensor]]) -> None:
    """Replaces captures of a graph and keeps their order, which is that of the function's inputs."""
    captured = dict(captures.by_val_external)
    if not any(id(external) in replacements for external in captured.values()):
        return
    for key, external in captured.items():
        _, internal, kind = captures.pop(key)
        former, present = replacements.get(id(external), (None, external))
        captures.add_or_replace(id(present) if key == id(former) else key, present, internal, kind)
    # Updates a cache that would keep the former resources alive.
    captures.capture_types  # noqa: B018
