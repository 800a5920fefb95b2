"""A `tf.Variable` whose value is stored elsewhere: in several other variables, or in a table.

The variable's handle has the whole shape but no value, and takes no memory. Gradient tapes know the variable by this
handle, so that they have its gradients as for any other variable, also through branches, loops and calls.

                          handle                  parts, on parameter servers
                             |                          |
  what tapes record          +---> rows_read <----------+    what is computed
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import ops
from tensorflow.python.ops import resource_variable_ops, while_v2
from tensorflow.python.saved_model import save_context

from coordinator.ps_strategy.tensorflow_internals.handles import handle_without_value, variable_spec
from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced

# The size in bytes above which a variable may not be read in a loop with gradients, which have the whole shape.
LARGEST_IN_LOOP = 2**28

_ROWS, _VALUE = "CoordinatorRowsOfUnstoredVariable", "CoordinatorValueOfUnstoredVariable"


class UnstoredVariable(resource_variable_ops.ResourceVariable):
    """A variable without its own value. A subclass defines how the variable is read and changed.

    `name` includes name scopes, but not `:0`. All dimensions of `shape` must be known. The handle is on `device`.
    `options` are `synchronization`, `aggregation` and `constraint` of a `tf.Variable`.
    """

    # Private: the base class, its constructor and the handle. TensorFlow and Keras look up single rows only in
    # instances of this class, and no public way makes an instance without a value.
    def __init__(
        self, name: str, shape: Any, dtype: Any, device: str, *, trainable: bool = True, **options: Any
    ) -> None:
        handle: Any = handle_without_value(shape, dtype, name, device)
        with tf.init_scope():
            unique_id = f"{name}_{ops.uid()}"
            handle._parent_trackable = weakref.ref(self)
            handle._name, handle._unique_id = f"{name}:0", unique_id
            resource_variable_ops.BaseResourceVariable.__init__(
                self,
                trainable=trainable,
                shape=shape,
                dtype=dtype,
                handle=handle,
                handle_name=name,
                unique_id=unique_id,
                in_graph_mode=False,
                **options,
            )

    @classmethod
    def _variable_call(cls, *args: Any, **kwargs: Any) -> None:
        """Lets the constructor make instances; `tf.Variable` would ask the creators of variables."""

    # Private, getter and setter: an eager operation that takes a variable reads through this attribute if it is a
    # tensor, and does not ask for the value.
    @property
    def _handle(self) -> None:
        return None

    @_handle.setter
    def _handle(self, handle: Any) -> None:
        self._handle_without_value = handle

    @property
    def handle(self) -> Any:
        """The handle by which gradient tapes know the variable."""
        return self._handle_without_value

    def __tf_tracing_type__(self, _: Any) -> Any:
        # A function is traced for each variable: the variables that hold the value are not arguments of the function.
        return _OfOneVariable(weakref.ref(self))

    def _rows_read(self, rows: Any, indices: Any) -> Any:
        """Returns rows that were read, [..., *row], as a differentiable function of this variable at these indices."""
        return _connected(self, _ROWS, rows, indices)

    def _value_read(self, value: Any) -> Any:
        """Returns the whole value that was read, as a differentiable function of this variable."""
        return _connected(self, _VALUE, value)


@dataclasses.dataclass(frozen=True, eq=False)
class _OfOneVariable(tf.types.experimental.TraceType):
    """The type of an argument that is always the same variable."""

    variable: Any

    def is_subtype_of(self, other: Any) -> bool:
        return self == other

    def most_specific_common_supertype(self, others: Any) -> Any:
        return self if all(self == other for other in others) else None

    def placeholder_value(self, context: Any) -> Any:
        variable = self.variable()
        # Private: TensorFlow would take the handle of a variable argument as an input, not as a capture.
        context.context_graph.capture(variable.handle)
        return variable

    def flatten(self) -> list[Any]:
        return [tf.TensorSpec([], tf.resource)]

    def to_tensors(self, value: Any) -> list[Any]:
        return [value.handle]

    def from_tensors(self, tensors: Any) -> Any:
        next(tensors)
        return self.variable()

    def cast(self, value: Any, _: Any) -> Any:
        return value

    def __hash__(self) -> int:
        return id(self.variable())

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _OfOneVariable) and self.variable() is other.variable() is not None


def _connected(variable: Any, gradient: str, value: Any, *inputs: Any) -> Any:
    resource_variable_ops.variable_accessed(variable)
    with record.stop_recording():
        if not tf.executing_eagerly():
            value = _connected_in_graph(variable, gradient, value, inputs)
    backward = _GRADIENTS[gradient]
    # Private: TensorFlow's own reads record themselves on tapes in the same way.
    record.record_operation(
        gradient, [value], [variable.handle], lambda change: [backward(variable.handle, change, *inputs)]
    )
    return value


def _connected_in_graph(variable: Any, gradient: str, value: Any, inputs: Any) -> Any:
    """Returns the value as the result of an operation on the handle, for the gradients of a loop or a function.

    These gradients are derived from operations, not from a tape. Only a call can take the handle of a variable on
    another server without running on that server. Before the call runs, TensorFlow replaces it by the called function.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    arguments = [value, variable.handle, *inputs]
    with tf.init_scope():
        signature = [tf.TensorSpec(None, argument.dtype) for argument in arguments]
        function: Any = tf.function(lambda first, *others: tf.identity(first), signature, autograph=False)
        first = function.get_concrete_function()
    first.add_to_graph(graph)
    with graph.gradient_override_map({"PartitionedCall": gradient}), tf.device("/device:CPU:0"):
        # The handle is an argument: a control dependency would also delay the value and all that is computed from it.
        connected = tf.raw_ops.PartitionedCall(args=arguments, Tout=[value.dtype], f=first)[0]
    connected.set_shape(value.shape)
    return connected


def _spec(handle: Any) -> tf.TensorSpec:
    spec = variable_spec(handle)
    assert spec is not None, "all dimensions of an unstored variable are known"
    return spec


def _gradient_of_rows(handle: Any, change: Any, indices: Any) -> tf.IndexedSlices:
    sizes = _spec(handle).shape.as_list()
    # The shape is int32 as in TensorFlow's look-ups, unless the parts together have more rows than an int32 can count.
    shape = tf.constant(sizes, tf.int32 if max(sizes) <= tf.int32.max else tf.int64)
    values = tf.reshape(change, tf.concat([[-1], shape[1:]], 0))
    return tf.IndexedSlices(values, tf.reshape(indices, [-1]), shape)


_GRADIENTS: dict[str, Callable[..., Any]] = {_ROWS: _gradient_of_rows, _VALUE: lambda handle, change: change}


def _refuse_large_loops(handle: Any) -> None:
    """Raises ValueError if the variable is large and the gradient of a loop body is being traced.

    TensorFlow adds the gradients of all iterations to zeros of the variable's whole shape, on the worker.
    """
    spec = _spec(handle)
    size = spec.shape.num_elements() * spec.dtype.size
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None and size > LARGEST_IN_LOOP:
        # Private: no public attribute distinguishes the graph of a loop's gradient.
        if isinstance(graph, while_v2._WhileBodyGradFuncGraph):
            raise ValueError(
                f"A sharded variable of shape {spec.shape.as_list()} is read inside of the body of a loop "
                "(tf.while_loop, or for and while in a tf.function), and a gradient is computed through the loop. "
                f"TensorFlow would add up gradients of this shape, {size / 2**20:,.0f} MB in each turn. Read what the "
                "loop needs before it, or have the tape inside of the body."
            )
        graph = getattr(graph, "outer_graph", None)


@contextlib.contextmanager
def loops_differentiable() -> Iterator[None]:
    """A scope in which gradients are computed through loops that read an unstored variable."""
    # Private: TensorFlow adds gradients to zeros of the shape that the variable's value has at run time. An unstored
    # variable has no value, but its handle has the same shape.
    stock = while_v2._zeros_like

    @functools.wraps(stock)
    def zeros_like(op_input: Any, op_output: Any) -> Any:
        spec = variable_spec(op_input) if op_output.dtype == tf.resource else None
        return stock(op_input, op_output) if spec is None else tf.zeros(spec.shape, spec.dtype)

    with attribute_replaced(while_v2, "_zeros_like", zeros_like):
        yield


@tf.RegisterGradient(_ROWS)
def _rows_backward(operation: Any, change: Any) -> list[Any]:
    _, handle, indices = operation.inputs
    _refuse_large_loops(handle)
    return [None, _gradient_of_rows(handle, change, indices), None]


@tf.RegisterGradient(_VALUE)
def _value_backward(operation: Any, change: Any) -> list[Any]:
    _refuse_large_loops(operation.inputs[1])
    return [None, change]


@contextlib.contextmanager
def not_recorded() -> Iterator[None]:
    """A scope in which tapes record nothing, and an outer colocation does not decide where operations run."""
    # Private: `tf.nn.embedding_lookup` colocates its operations with the handle. `tf.Variable.value` undoes this, too.
    with record.stop_recording(), ops.colocate_with(None, ignore_existing=True):
        yield


def is_being_exported() -> bool:
    """Returns True while functions are traced for a SavedModel."""
    # Private: no public function tells whether an export is running.
    return bool(save_context.in_save_context())


class TableVariable(resource_variable_ops.BaseResourceVariable):
    """A variable without a value that represents all rows of a table, for gradient tapes and optimizers.

    The variable's gradient is a `tf.IndexedSlices` whose indices are keys of the table, not numbers of rows.

    `shape` begins with the largest number of rows of the table. `apply_gradients` changes rows by a gradient; see
    `Table.apply_gradients`. `new_accumulated` returns an object that sums gradients; see `AccumulatedGradient`.
    """

    def __init__(
        self,
        name: str,
        shape: list[int],
        dtype: tf.DType,
        apply_gradients: Callable[[Any], None],
        new_accumulated: Callable[[], Any],
    ) -> None:
        # Private: publicly, a variable has a value, which would take the memory of all rows. TensorFlow would create
        # the handle's resource at the first use of the handle, which does not happen.
        super().__init__(
            trainable=True,
            shape=tf.TensorShape(shape),
            dtype=dtype,
            handle=handle_without_value(tf.TensorShape(shape), dtype, name, "/device:CPU:0"),
            handle_name=name,
            unique_id=f"{name}_{id(self)}",
            in_graph_mode=False,
            synchronization=tf.VariableSynchronization.AUTO,
            aggregation=tf.VariableAggregation.NONE,
        )
        self.apply_gradients = apply_gradients
        self.new_accumulated = new_accumulated
        self._table = name

    def recorded(self, rows: Any, gradient: Callable[[Any], tf.IndexedSlices]) -> Any:
        """Returns rows, a tensor, and records them on tapes as the result of a read of this variable.

        `gradient` takes the gradient with respect to the rows, and returns the gradient with respect to this variable.
        """
        # Private: no public function records a read with its gradient.
        resource_variable_ops.variable_accessed(self)
        record.record_operation("TableLookup", [rows], [self.handle], lambda output: [gradient(output)])
        return rows

    def is_recorded(self) -> bool:
        """Returns True if a gradient tape would record a look-up now."""
        # Private: no public function tells whether a tape records.
        resource_variable_ops.variable_accessed(self)
        return bool(record.should_record_backprop([self.handle]))

    def _serialize_to_tensors(self) -> dict[str, Any]:
        # Private: a checkpoint saves nothing of this variable; the table saves the rows.
        return {}

    def _restore_from_tensors(self, restored_tensors: Any) -> None:
        pass

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        raise NotImplementedError(
            f"The rows of the table {self._table!r} cannot be read as a whole: look keys up with table.lookup."
        )

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Raises NotImplementedError: rows are looked up by key."""
        return self._read_variable_op()

    gather_nd = sparse_read

    def is_initialized(self, name: str | None = None) -> Any:
        """Returns True: there is no value to wait for."""
        return tf.constant(True)

    def __deepcopy__(self, memo: Any) -> Any:
        raise NotImplementedError("A table cannot be copied.")

    def __repr__(self) -> str:
        return f"<TableVariable {self._table!r} shape={self.shape}>"
