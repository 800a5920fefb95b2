"""Handles of variables and tables, which functions capture and a recovery replaces.

A mutable table on a parameter server has a name (`TableResource`), by which datasets on other servers find the table.
"""

import contextlib
import copy
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.framework import func_graph, ops
from tensorflow.python.ops import handle_data_util, resource_variable_ops
from tensorflow.python.trackable import resource as trackable_resource

from coordinator.ps_strategy.tensorflow_internals.functions import captures_of
from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced

# The classes of mutable tables in `tf.lookup.experimental`; also the kinds of `resource_creator_scope`.
KINDS = ("MutableHashTable", "DenseHashTable")
_ANONYMOUS = "experimental_is_anonymous"


def resource_creator_scope(kind: str, creator: Callable[..., Any]) -> Any:
    """A scope in which lookup tables of a kind are created by `creator(next_creator, *args, **kwargs)`."""

    def create(*args: Any, **kwargs: Any) -> Any:
        return creator(*args, **kwargs)

    # Private: the hook of `tf.distribute.StrategyExtended` for tables has no public counterpart. `create` is a
    # function, because TensorFlow makes deep copies of creators: with a method, it would copy the method's object.
    return ops.resource_creator_scope(kind, create)


def is_restored_resource(table: Any) -> bool:
    """Returns True if a table came from a SavedModel, whose functions create and fill the table."""
    # Private: loaded tables have no public class.
    return isinstance(table, trackable_resource.RestoredResource)


def restored_functions(table: Any) -> tuple[Any, Any]:
    """Returns the concrete functions that create and fill a table from a SavedModel."""
    # Private: SavedModel stores the functions under these names.
    create, initialize = table._create_resource, table._initialize
    return create.concrete_functions[0], initialize.concrete_functions[0]


def is_on_parameter_server(device: str) -> bool:
    return bool(tf.DeviceSpec.from_string(device).job == "ps")


def is_server_handle(tensor: Any) -> bool:
    is_resource = tensor.dtype == tf.resource and not tf.is_symbolic_tensor(tensor)
    return is_resource and is_on_parameter_server(tensor.device)


def owner_of_handle(tensor: Any) -> Any | None:
    """Returns the lookup table or variable that a resource handle belongs to, or None."""
    # Private: the captures of a function are handles, and no public attribute leads from a handle to its owner.
    owner = getattr(tensor, "_parent_trackable", None)
    return owner() if owner is not None else None


def present_handle(tensor: Any) -> Any:
    """Returns the current handle of the variable or table that a handle belongs to; any other tensor unchanged."""
    owner = owner_of_handle(tensor)
    return tensor if owner is None else _handle_of(owner)


def _handle_of(owner: Any) -> tf.Tensor:
    return owner.handle if isinstance(owner, tf.Variable) else owner.resource_handle


class _TolerantDeleter(resource_variable_ops.EagerResourceDeleter):
    __slots__ = ()

    def __del__(self) -> None:
        with contextlib.suppress(tf.errors.OpError):
            super().__del__()


def free_if_present(queue: Any) -> None:
    """Makes a queue free its resource without an error if the server has lost the resource."""
    # Private: the stock deleter raises its error in `__del__`, where nothing can catch it.
    queue._resource_deleter.__class__ = _TolerantDeleter


def copy_handle_data(source: Any, target: Any) -> None:
    """Copies the shape and type of a handle's resource to a symbolic handle."""
    # Private: the `tf.TensorSpec` of a handle has neither the shape nor the type of the resource.
    handle_data_util.copy_handle_data(source, target)


def variable_spec(handle: Any) -> tf.TensorSpec | None:
    """Returns the shape and type of a handle's variable; None if they are not known completely."""
    # Private: publicly, only a `tf.Variable` has both. An operation on the handle would run on the handle's server.
    known = resource_variable_ops.get_eager_safe_handle_data(handle) if handle.dtype == tf.resource else None
    if known is None or not known.is_set or len(known.shape_and_type) != 1:
        return None
    spec = tf.TensorSpec(known.shape_and_type[0].shape, known.shape_and_type[0].dtype)
    return spec if spec.shape.is_fully_defined() else None


def handle_without_value(shape: Any, dtype: tf.DType, name: str, device: str) -> tf.Tensor:
    """Returns the handle of a new variable on a device. The variable takes no memory until it has a value."""
    # Private: publicly, a resource is created only together with a variable and its value.
    with tf.init_scope(), tf.device(None), tf.device(device):
        return resource_variable_ops._variable_handle_from_shape_and_dtype(
            shape, dtype, shared_name=None, name=name, graph_mode=False
        )


def new_handle(variable: Any) -> tf.Tensor:
    """Returns the handle of a new resource without a value, with the server and the type of a variable."""
    handle = handle_without_value(variable.shape, variable.dtype, variable.name, variable.device)
    # Private: see `copy_handle_data`.
    handle._handle_data = variable.handle._handle_data
    return handle


class TracedFunctions:
    """Weak references to the graphs and the concrete functions that were created within `recorded`.

    No other graph or function can have captured a handle of a variable or table of the strategy that records them. The
    program may hold the graphs and functions anywhere: in a Keras model, a SavedModel, a closure.
    """

    def __init__(self) -> None:
        # The keys are ids. `valuerefs` copies the references in one step, as other threads may trace at the same time.
        self._graphs: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._functions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    @contextlib.contextmanager
    def recorded(self) -> Iterator["TracedFunctions"]:
        """A scope in which each graph and concrete function of this process is recorded."""
        # Private: TensorFlow has no list of its functions. A search of Python's objects would not find objects that
        # `gc.freeze` has hidden, and would take seconds in a large program.
        with (
            _recorded_in(self._graphs, func_graph.FuncGraph),
            _recorded_in(self._functions, concrete_function.ConcreteFunction),
        ):
            yield self

    def graphs(self) -> list[Any]:
        """Returns the living graphs."""
        return [graph for reference in self._graphs.valuerefs() if (graph := reference()) is not None]

    def functions(self) -> list[Any]:
        """Returns the living concrete functions."""
        return [function for reference in self._functions.valuerefs() if (function := reference()) is not None]


def _recorded_in(made: "weakref.WeakValueDictionary[int, Any]", kind: Any) -> contextlib.AbstractContextManager[None]:
    construct = kind.__init__

    @functools.wraps(construct)
    def construct_and_record(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        made[id(self)] = self

    return attribute_replaced(kind, "__init__", construct_and_record)


def replace_handles(renewed: Iterable[tuple[Any, tf.Tensor]], traced: TracedFunctions) -> None:
    """Replaces the handles of variables and tables, also in every function of `traced` that has captured a handle.

    No function that uses the handles may be running. `renewed` has each variable or table with its new handle.
    """
    # The keys are `id(former)`. The values keep the former handles alive, so that no other tensor gets the same id.
    replacements: dict[int, tuple[Any, tf.Tensor]] = {}
    for owner, handle in renewed:
        former = _handle_of(owner)
        _set_handle(owner, handle)
        replacements[id(former)] = former, handle
    for graph in traced.graphs():
        _replace_captures(graph.function_captures, replacements)
    for function in traced.functions():
        captures = captures_of(function)
        if any(id(capture) in replacements for capture in captures):
            function.set_external_captures([replacements.get(id(capture), (None, capture))[1] for capture in captures])


def forget_handles(owners: Iterable[Any]) -> None:
    """Gives variables and tables handles without a resource, in this process. Operations on these handles raise errors.

    After a reset of TensorFlow, an operation with a former handle of a server's resource would end the process.
    """
    with tf.device("/device:CPU:0"):
        for owner in owners:
            dtype, shape = getattr(owner, "dtype", tf.float32), getattr(owner, "shape", [])
            # Without a name, the variable would exist, and be read as an empty tensor.
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
    """Replaces captures of a graph and keeps their order, which is the order of the function's inputs."""
    captured = dict(captures.by_val_external)
    if not any(id(external) in replacements for external in captured.values()):
        return
    for key, external in captured.items():
        _, internal, kind = captures.pop(key)
        former, present = replacements.get(id(external), (None, external))
        captures.add_or_replace(id(present) if key == id(former) else key, present, internal, kind)
    # Reading this property updates a cache that would keep the former resources alive.
    captures.capture_types  # noqa: B018


def is_created_by_keras() -> bool:
    """Returns True if Keras itself is creating the current table or variable.

    Keras counts words in such a table while a layer is adapted on the client; no step uses the table.
    """
    # Private: TensorFlow does not tell a creator which code calls it, and the layers of Keras 2 and 3 have no hook.
    frame: Any = sys._getframe()
    while frame is not None and _package(frame) in ("coordinator", "tensorflow"):
        frame = frame.f_back
    return frame is not None and _package(frame) in ("keras", "tf_keras")


def _package(frame: Any) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


class TableResource:
    """The resource of a table of one of the `KINDS`, with a name on a server's `device`.

    Datasets on other servers find the resource by its name. No other client of the server finds the resource, and the
    server frees it with all other resources of this client.
    """

    def __init__(self, table: Any, device: str) -> None:
        # Private: publicly, a resource is created only with its table. `_creator` is a copy, as it outlives the table.
        self._creator = copy.copy(table)
        self._creator._resource_handle = None
        self._device = device

    def handle(self) -> tf.Tensor:
        """Returns a handle of the resource; creates an empty resource if there is none."""
        with tf.init_scope(), tf.device(None), tf.device(self._device):
            return self._creator._create_resource()

    def free(self) -> None:
        """Frees the resource, if there is one; its handles become useless."""
        tf.raw_ops.DestroyResourceOp(resource=self.handle())


class _RemoteDenseHashTable(tf.lookup.experimental.DenseHashTable):
    """A table that accepts its own exported content.

    TensorFlow exports scalar keys as vectors of one element. A table on a server checks known shapes at an import, and
    would refuse such vectors.
    """

    def _restore_from_tensors(self, restored_tensors: Mapping[str, Any]) -> Any:
        # Private: TensorFlow restores checkpoints by this method.
        restore = super()._restore_from_tensors
        if not tf.executing_eagerly():
            return restore(restored_tensors)

        @tf.function(
            autograph=False, input_signature=[tf.TensorSpec(None, part.dtype) for part in restored_tensors.values()]
        )
        def restore_any_shape(*parts: Any) -> None:
            restore(dict(zip(restored_tensors, parts, strict=True)))

        return restore_any_shape(*restored_tensors.values())


class _OnAnyDevice:
    """Methods of a mutable table whose operations are not placed on the device of the client's table."""

    resource_handle: tf.Tensor
    key_dtype: tf.DType
    value_dtype: tf.DType
    _default_value: tf.Tensor

    def size(self, name: str | None = None) -> tf.Tensor:
        return tf.raw_ops.LookupTableSizeV2(table_handle=self.resource_handle, name=name)

    def lookup(self, keys: Any, dynamic_default_values: Any = None, name: str | None = None) -> tf.Tensor:
        # Private: the value for unknown keys has no public name.
        default = self._default_value if dynamic_default_values is None else dynamic_default_values
        keys = tf.convert_to_tensor(keys, self.key_dtype)
        return tf.raw_ops.LookupTableFindV2(
            table_handle=self.resource_handle, keys=keys, default_value=default, name=name
        )

    def insert(self, keys: Any, values: Any, name: str | None = None) -> Any:
        keys, values = tf.convert_to_tensor(keys, self.key_dtype), tf.convert_to_tensor(values, self.value_dtype)
        return tf.raw_ops.LookupTableInsertV2(table_handle=self.resource_handle, keys=keys, values=values, name=name)

    def export(self, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        exported = tf.raw_ops.LookupTableExportV2(
            table_handle=self.resource_handle, Tkeys=self.key_dtype, Tvalues=self.value_dtype, name=name
        )
        return exported.keys, exported.values


_ON_ANY_DEVICE = {
    kind: type(f"{kind.__name__}OnAnyDevice", (_OnAnyDevice, kind), {"__module__": __name__})
    for kind in (tf.lookup.experimental.MutableHashTable, tf.lookup.experimental.DenseHashTable)
}


def let_run_anywhere(table: Any) -> None:
    """Lets functions that use a mutable table of the client run on any device, with the table of that device."""
    table.__class__ = _ON_ANY_DEVICE.get(type(table), type(table))


def create_mutable_table(
    next_creator: Callable[..., Any], device: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, TableResource]:
    """Creates a table by `next_creator(*args, **kwargs)`. The resource is on `device`, other tensors on the client."""
    # The table is created anonymous, so that its first resource is freed when the named resource replaces it.
    with tf.device(None), tf.device("/device:CPU:0"):
        table = next_creator(*args, **{**kwargs, _ANONYMOUS: True})
    if not kwargs.get(_ANONYMOUS):
        # Private: the constructor of a table with a name sets these attributes.
        table._is_anonymous, table._shared_name = False, f"table_{ops.uid()}"
    if type(table) is tf.lookup.experimental.DenseHashTable:
        table.__class__ = _RemoteDenseHashTable
    resource = TableResource(table, device)
    table._resource_handle = resource.handle()
    return table, resource


def table_content(table: Any) -> dict[str, np.ndarray]:
    """Returns the content of a table as a checkpoint would hold it, in arrays on the client."""
    # Private: `export` of a `DenseHashTable` returns free buckets too, which `insert` refuses.
    return {name: tensor.numpy() for name, tensor in table._serialize_to_tensors().items()}


def set_table_content(table: Any, content: Mapping[str, np.ndarray]) -> None:
    """Replaces the content of a table by a result of `table_content`."""
    # Private: see `table_content`.
    table._restore_from_tensors({name: tf.convert_to_tensor(array) for name, array in content.items()})


def table_name(table: Any) -> str:
    # Private: `table.name` is None when eager execution is enabled.
    return str(table._name)
