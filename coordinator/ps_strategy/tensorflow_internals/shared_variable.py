"""Variables that several workers read and change at the same time, and mutexes on their servers.

- Additions (`make_shared`): no addition to a variable or its rows is lost, however many workers add at the same time.
- Reads: a function that uses a scalar many times reads it once. For example, an optimizer uses its learning rate and
  its count of updates for each variable of a model. Within `reads_replaced`, a rule answers reads with its own copy.
"""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import control_flow_v2_func_graphs, resource_variable_ops

from coordinator.ps_strategy.tensorflow_internals.checkpoint_savers import VARIABLE
from coordinator.ps_strategy.tensorflow_internals.handles import is_on_parameter_server


@contextlib.contextmanager
def operations_added() -> Iterator[list[Any]]:
    """A scope that yields a list, which after the scope holds the operations that the scope has added to the graph."""
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    operations: list[Any] = []
    yield operations
    operations += graph.get_operations()[before:]


def client_may_call(*signature: tf.TensorSpec) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a method that adds operations to a graph. If the client calls the method, a `tf.function` runs it.

    `signature` describes the client's arguments, without `self`.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(method)
        functions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

        @functools.wraps(method)
        def call(self: Any, *arguments: Any) -> Any:
            if not tf.executing_eagerly():
                return method(self, *arguments)
            if self not in functions:
                # Each object has its own partial function, because TensorFlow warns of a method that is traced for
                # several objects. The weak reference does not keep the object alive.
                bound = functools.partial(_call_of, method, weakref.ref(self))
                functions[self] = tf.function(bound, input_signature=signature, autograph=False)
            bound_arguments = parameters.bind(self, *arguments)
            bound_arguments.apply_defaults()
            return functions[self](*bound_arguments.args[1:])

        return call

    return decorate


def _call_of(method: Callable[..., Any], reference: Callable[[], Any], *arguments: Any) -> Any:
    return method(reference(), *arguments)


class ServerMutex:
    """A mutex on the CPU of a server, `device`, under which operations of one graph at a time run.

    The mutex is a TensorFlow resource that is looked up by name at each use, and so exists on a restarted server, too.
    A cancelled call, such as a call of a dead worker, releases the mutex. Operations under a mutex should be on its own
    server: otherwise another server that hangs blocks everyone. A new client may reuse the names of a dead client.
    """

    def __init__(self, name: str, device: str) -> None:
        self._name = name
        self.device = device

    @contextlib.contextmanager
    def hold(self, after: Sequence[Any] = ()) -> Iterator[None]:
        """A scope whose operations run under the mutex and, by default, on the mutex's server.

        The mutex is acquired once the tensors and operations in `after` are available.
        """
        with tf.device(self.device):
            # Identities are awaited instead of inputs of a function, which may start before its inputs are available.
            awaited = [tf.identity(wanted) if tf.is_tensor(wanted) else wanted for wanted in after]
            with tf.control_dependencies(awaited):
                lock = tf.raw_ops.MutexLock(mutex=tf.raw_ops.MutexV2(shared_name=self._name))
            with operations_added() as operations, tf.control_dependencies([lock]):
                yield
            with tf.control_dependencies(operations):
                tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)


@contextlib.contextmanager
def reads_replaced(variables: Sequence[Any], readers: Sequence[Any]) -> Iterator[None]:
    """A scope in which readers answer reads of variables. Tapes still attribute gradients to the variables.

    Each variable has a reader. `reader.copy(may_make=)` returns a tensor with the variable's value, or None to read the
    variable itself. With `may_make`, the whole value is needed and not only some rows, so that a new copy pays off.
    `reader.note_rows(rows)` records rows that were read from the variable itself.

    Raises ValueError if the reads of a variable are replaced already.
    """
    # Private: publicly, a read of an ordinary variable cannot be answered from a tensor.
    with contextlib.ExitStack() as stack:
        for variable, reader in zip(variables, readers, strict=True):
            if "_read_variable_op" in vars(variable):
                raise ValueError(f"The variable {variable.name!r} is read from a local copy already: pull cannot nest.")
            for name, method in _replaced_reads(variable, reader).items():
                setattr(variable, name, method)
                stack.callback(vars(variable).pop, name, None)
        yield


@contextlib.contextmanager
def reads_not_replaced(variables: Sequence[Any]) -> Iterator[None]:
    """A scope inside `reads_replaced` in which these variables are read normally."""
    # Private: see `reads_replaced`.
    replaced = [{name: vars(variable).pop(name, None) for name in _REPLACED_METHODS} for variable in variables]
    try:
        yield
    finally:
        for variable, methods in zip(variables, replaced, strict=True):
            vars(variable).update({name: method for name, method in methods.items() if method is not None})


_REPLACED_METHODS = ("_read_variable_op", "sparse_read", "gather_nd")


def _replaced_reads(variable: Any, reader: Any) -> dict[str, Callable[..., Any]]:
    kind = type(variable)

    def recorded(copy: Any) -> Any:
        resource_variable_ops.variable_accessed(variable)
        # The identity is in the copy's own graph: gradients of a loop or branch reach only tensors that it captured.
        with copy.graph.as_default(), tf.control_dependencies(None):
            value = tf.identity(copy)
            # The tape records a read of the variable, so the variable has the gradient.
            record.record_operation("ReadVariableOp", [value], [variable.handle], lambda gradient: [gradient])
        return value

    def read(no_copy: bool = False) -> Any:
        copy = reader.copy(may_make=True)
        return kind._read_variable_op(variable, no_copy) if copy is None else recorded(copy)

    def rows(method: Callable[..., Any], gather: Callable[..., Any], indices: Any, name: str | None) -> Any:
        copy = reader.copy(may_make=False)
        if copy is not None:
            return gather(recorded(copy), indices, name=name)
        read_there = method(variable, indices, name)
        reader.note_rows(read_there)
        return read_there

    def sparse_read(indices: Any, name: str | None = None) -> Any:
        return rows(kind.sparse_read, tf.gather, indices, name)

    def gather_nd(indices: Any, name: str | None = None) -> Any:
        return rows(kind.gather_nd, tf.gather_nd, indices, name)

    return dict(zip(_REPLACED_METHODS, (read, sparse_read, gather_nd), strict=True))


def read_variable(variable: Any) -> tf.Tensor:
    """Reads the variable itself, without recording the read on gradient tapes."""
    # Private: every public way to read goes through the methods that `reads_replaced` replaces.
    if hasattr(variable, "parts"):
        return tf.concat([read_variable(part) for part in variable.parts], 0)
    return resource_variable_ops.gen_resource_variable_ops.read_variable_op(variable.handle, variable.dtype)


def graph_around(graph: Any, part: Any = control_flow_v2_func_graphs.ControlFlowFuncGraph) -> Any | None:
    """Returns the graph around a branch or a loop body; None for any other graph, such as a function's graph.

    A function that captures tensors of the graph around it cannot be called from elsewhere.
    """
    # Private: no public attribute gives the outer graph, or tells a branch from a loop or a function.
    return graph.outer_graph if isinstance(graph, part) else None


def is_within(graph: Any) -> bool:
    """Returns True if operations are currently added to this graph, or to a branch or loop inside it."""
    current = tf.compat.v1.get_default_graph()
    while current is not None and current is not graph:
        current = graph_around(current)
    return current is graph


_READ_OPERATIONS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")


def is_present_value(variable: Any, tensor: Any) -> bool:
    """Returns True if a tensor was read, perhaps before a branch, from a variable that is unchanged since then."""
    if tensor.dtype != variable.dtype:
        return False
    handle = _captured(tensor.graph, variable.handle)
    if tensor.op.type == "ReadVariableOp":
        # A function has one tensor for each captured handle.
        return tensor.op.inputs[0] is handle and not _is_changed_after(handle, tensor.op)
    outer = _around_branch(tensor.graph)
    if outer is None or (handle is not None and _changes(handle)):
        return False
    read = next((outside for outside, inside in tensor.graph.captures if inside is tensor), None)
    return read is not None and read.graph is outer and is_present_value(variable, read)


def value_read_before(variable: Any) -> Any | None:
    """Returns the present value of a variable if the function being traced has read it already, otherwise None.

    The result is also None under `tf.control_dependencies`, where a read must happen after other operations.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    around: Any = graph
    while around is not None:
        # Private: the active `tf.control_dependencies` are not public.
        if around._current_control_dependencies():
            return None
        around = _around_branch(around)
    return _value_read_in(graph, variable)


def _value_read_in(graph: Any, variable: Any) -> Any | None:
    handle = _captured(graph, variable.handle)
    if handle is not None:
        reads = [read for read in handle.consumers() if read.type == "ReadVariableOp" and not read.control_inputs]
        if reads and not _is_changed_after(handle, reads[-1]):
            return reads[-1].outputs[0]
        if _changes(handle):
            return None
    outer = _around_branch(graph)
    read = None if outer is None else _value_read_in(outer, variable)
    return None if read is None else graph.capture(read)


def _captured(graph: Any, handle: Any) -> Any | None:
    return next((inside for outside, inside in graph.captures if outside is handle), None)


def _around_branch(graph: Any) -> Any | None:
    """Returns the graph around a branch; None for any other graph, such as the body of a loop, which may run again."""
    return graph_around(graph, control_flow_v2_func_graphs.CondBranchFuncGraph)


def _changes(handle: Any) -> set[str]:
    return {change.name for change in handle.consumers() if change.type not in _READ_OPERATIONS}


def _is_changed_after(handle: Any, read: Any) -> bool:
    changes = _changes(handle)
    if not changes:
        return False
    names = [operation.name for operation in handle.graph.get_operations()]
    return not changes.isdisjoint(names[names.index(read.name) :])


def change_of(variable: Any, value: Any) -> tuple[bool, Any] | None:
    """Recognizes an assignment that adds to a variable or subtracts from it.

    Returns True for an addition or False for a subtraction, and the amount; None if the value is not the present value
    of the variable plus or minus something.
    """
    graph = tf.compat.v1.get_default_graph()
    if not (isinstance(value, tf.Tensor) and tf.is_symbolic_tensor(value) and value.graph is graph):
        return None
    is_sum = value.op.type in ("Add", "AddV2")
    if not (is_sum or value.op.type == "Sub") or not variable.shape.is_fully_defined():
        return None
    if not variable.shape.is_compatible_with(value.shape):
        # The assignment itself raises the error.
        return None
    left, right = value.op.inputs
    if is_present_value(variable, left):
        return is_sum, right
    return (True, left) if is_sum and is_present_value(variable, right) else None


def _exclusive_method(exclusive: str) -> Any:
    """Returns a method that passes `tf.IndexedSlices` to the variable's `scatter_nd_...` method named `exclusive`."""

    def scatter(self: Any, sparse_delta: Any, use_locking: Any = False, name: str | None = None) -> Any:
        return getattr(self, exclusive)(*_indices_and_updates(self, sparse_delta), name)

    return scatter


def _anywhere_method(method: str) -> Any:
    """Returns a `scatter_nd_...` method that the client can call eagerly for variables on any device."""

    def scatter_nd(self: Any, indices: Any, updates: Any, name: str | None = None) -> Any:
        # An eager kernel does not know the shape of a variable on a server, and refuses all updates.
        if not tf.executing_eagerly() or not is_on_parameter_server(self.device):
            return getattr(super(ExclusiveScatter, self), method)(indices, updates, name)
        _scatter_nd(self, method, tf.convert_to_tensor(indices), tf.convert_to_tensor(updates, self.dtype))
        return self._lazy_read(None)

    return scatter_nd


@tf.function(autograph=False, reduce_retracing=True)
def _scatter_nd(variable: Any, method: str, indices: Any, updates: Any) -> None:
    getattr(variable, method)(indices, updates)


def _method_in_turn(method: str) -> Any:
    """Returns a `scatter_...` method that runs a kernel with a shared lock under a mutex, as no other kernel exists."""

    def scatter(self: Any, sparse_delta: Any, use_locking: Any = False, name: str | None = None) -> Any:
        _check_rows(sparse_delta)
        cpu = str(tf.DeviceSpec.from_string(self.device).replace(device_type="CPU", device_index=0).to_string())
        if not tf.executing_eagerly():
            # All variables of a server share one mutex. All variables of a shape share a trace, so the name of the
            # mutex cannot contain the variable.
            with ServerMutex("coordinator/scatter", cpu).hold([sparse_delta.values, sparse_delta.indices]):
                return getattr(super(ExclusiveScatter, self), method)(sparse_delta, use_locking, name)
        values = tf.convert_to_tensor(sparse_delta.values, self.dtype)
        _scatter_in_turn(self, method, cpu, values, tf.convert_to_tensor(sparse_delta.indices))
        return self._lazy_read(None)

    return scatter


@tf.function(autograph=False, reduce_retracing=True)
def _scatter_in_turn(variable: Any, method: str, cpu: str, values: Any, indices: Any) -> None:
    # The argument `cpu` makes TensorFlow trace the function for each server, where the mutex is.
    del cpu
    getattr(variable, method)(tf.IndexedSlices(values, indices))


class ExclusiveScatter:
    """A mixin for variable classes that changes rows with kernels that lock the variable exclusively.

    TensorFlow's kernels `ResourceScatterAdd`, `ResourceScatterUpdate` and so on take a shared lock of the variable. Two
    of them that run at the same time may both add to the same old value of a row. `ResourceScatterNdAdd` and so on take
    an exclusive lock, and are as fast. `batch_scatter_update` is exclusive in TensorFlow. Products and quotients have
    no exclusive kernels: `scatter_mul` and `scatter_div` run one after the other on a server, under a mutex, which
    costs two more operations on the server. The exclusive kernels lock out `scatter_mul` and `scatter_div`, too.

    Arguments, results and errors of the methods are the same as for `tf.Variable`.
    """

    scatter_add = _exclusive_method("scatter_nd_add")
    scatter_sub = _exclusive_method("scatter_nd_sub")
    scatter_max = _exclusive_method("scatter_nd_max")
    scatter_min = _exclusive_method("scatter_nd_min")
    scatter_update = _exclusive_method("scatter_nd_update")
    scatter_mul = _method_in_turn("scatter_mul")
    scatter_div = _method_in_turn("scatter_div")

    scatter_nd_add = _anywhere_method("scatter_nd_add")
    scatter_nd_sub = _anywhere_method("scatter_nd_sub")
    scatter_nd_max = _anywhere_method("scatter_nd_max")
    scatter_nd_min = _anywhere_method("scatter_nd_min")
    scatter_nd_update = _anywhere_method("scatter_nd_update")

    def _lazy_read(self, operation: Any) -> Any:
        # Private: an assignment returns a variable, too. TensorFlow chooses the class of this variable here.
        unread: Any = super()._lazy_read(operation)  # type: ignore[misc]  # of the other base
        kind: Any = type(unread)
        unread.__class__ = with_mixin(ExclusiveScatter, kind)
        return unread


@functools.cache
def with_mixin(mixin: Any, kind: Any) -> Any:
    return type(f"{mixin.__name__.strip('_')}{kind.__name__}", (mixin, kind), {"__module__": __name__})


def _check_rows(sparse_delta: Any) -> None:
    if not isinstance(sparse_delta, tf.IndexedSlices):
        raise TypeError(f"Argument `sparse_delta` must be a `tf.IndexedSlices`. Received arg: {sparse_delta}")


def _indices_and_updates(variable: Any, sparse_delta: Any) -> tuple[Any, Any]:
    """Returns arguments that give `scatter_nd_...` the effect of `scatter_...` with the `tf.IndexedSlices`."""
    _check_rows(sparse_delta)
    indices = tf.convert_to_tensor(sparse_delta.indices)
    updates = tf.convert_to_tensor(sparse_delta.values, variable.dtype)
    if updates.shape.rank in (None, 0):
        # The scalar is broadcast on the variable's device, so that one number is sent instead of rows.
        with tf.device(variable.device):
            updates = _broadcast_if_scalar(updates, indices, variable)
    if indices.shape.rank in (None, 0):
        # The `scatter_nd` kernels take no scalar index. A new leading dimension does not change the result.
        indices, updates = indices[tf.newaxis], updates[tf.newaxis]
    return tf.expand_dims(indices, axis=-1), updates


def _broadcast_if_scalar(updates: Any, indices: Any, variable: Any) -> Any:
    if variable.shape.is_fully_defined():
        row = tf.constant(variable.shape.as_list()[1:], tf.int32)
    else:
        row = tf.raw_ops.VariableShape(input=variable.handle)[1:]
    rows = tf.concat([tf.shape(indices), row], axis=0)
    if updates.shape.rank == 0:
        return tf.broadcast_to(updates, rows)
    return tf.broadcast_to(updates, tf.cond(tf.equal(tf.rank(updates), 0), lambda: rows, lambda: tf.shape(updates)))


def make_shared(variable: Any) -> None:
    """Changes the class of a variable, so that functions may change it at the same time without losing additions.

    `variable.assign(variable + x)` and `variable.assign(variable - x)` become additions, if the function has not
    changed the variable since the read; other assignments stay. `scatter_add` and so on change rows one by one.

    A function reads a scalar that is not trainable once, and again after a change of the scalar, in the body of a loop,
    and under `tf.control_dependencies`. `read_value()` always reads.
    """
    # Private: the classes of variables have no public names, and no hook chooses other classes. A variable that is
    # created while a function is traced has another class.
    if isinstance(variable, resource_variable_ops.BaseResourceVariable):
        kind: Any = type(variable)
        variable.__class__ = with_mixin(_Shared, kind)


class _Shared(ExclusiveScatter):
    """The mixin of `make_shared`: assigning the value plus something is an atomic addition, and reads are shared."""

    def assign(self, value: Any, use_locking: Any = None, name: str | None = None, read_value: bool = True) -> Any:
        """Assigns, adds or subtracts; arguments and result are the same as for `tf.Variable.assign`."""
        variable: Any = self
        change = change_of(variable, value)
        if change is None:
            return super().assign(value, use_locking, name, read_value)  # type: ignore[misc]  # of the other base
        add, amount = change
        if amount.shape != variable.shape:
            amount = tf.broadcast_to(amount, variable.shape)
        return (variable.assign_add if add else variable.assign_sub)(amount, use_locking, name, read_value)

    def value(self) -> Any:
        """Returns the value; for a scalar, the value that the traced function has read before, if it is current."""
        before = None if tf.executing_eagerly() or not _may_share_reads(self) else value_read_before(self)
        return super().value() if before is None else before  # type: ignore[misc]  # of the other base

    def _serialize_to_tensors(self) -> Any:
        # Private: a checkpoint saves the returned tensors, which do not refer to the variable by themselves.
        tensors = super()._serialize_to_tensors()  # type: ignore[misc]  # of the other base
        for tensor in tensors.values():
            setattr(tensor, VARIABLE, self)
        return tensors


def _may_share_reads(variable: Any) -> bool:
    """Returns True if one read of a variable may serve all uses in a function."""
    # Larger values would be copied between servers. Private: `_read_variable_op` is the attribute that `reads_replaced`
    # sets, and no public function tells that a gradient tape must record the read itself.
    return bool(
        variable.shape.rank == 0
        and not variable.trainable
        and "_read_variable_op" not in vars(variable)
        and not record.should_record_backprop([variable.handle])
    )
