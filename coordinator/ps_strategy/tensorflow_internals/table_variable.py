"""A variable without a value that gradient tapes know: the rows of a table, which are read and changed elsewhere."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import resource_variable_ops


class TableVariable(resource_variable_ops.BaseResourceVariable):
    """Stands for all rows of a table where a tape or an optimizer expects a variable. It has no value and no memory.

    The gradient for it is a `tf.IndexedSlices` whose indices are keys of the table, not numbers of rows.

    Args:
      name: of the table.
      shape: the number of rows that the table may have, and the shape of one.
      dtype: of the rows.
      apply_gradients: changes the rows of a gradient, a `tf.IndexedSlices`; see `Table.apply_gradients`.
      new_accumulated: returns an object that sums gradients; see `AccumulatedGradient`.
    """

    def __init__(
        self,
        name: str,
        shape: list[int],
        dtype: tf.DType,
        apply_gradients: Callable[[Any], None],
        new_accumulated: Callable[[], Any],
    ) -> None:
        # Private: publicly, a variable has a value, which here would take the memory of all rows. The resource is
        # created when it is first used, so never.
        with tf.init_scope(), tf.device(None), tf.device("/device:CPU:0"):
            handle = resource_variable_ops._variable_handle_from_shape_and_dtype(
                tf.TensorShape(shape), dtype, shared_name=None, name=name, graph_mode=False
            )
        super().__init__(
            trainable=True,
            shape=tf.TensorShape(shape),
            dtype=dtype,
            handle=handle,
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
        """Returns rows as the tapes' result of reading this variable.

        Args:
          rows: a tensor.
          gradient: takes the gradient for `rows`, returns that for this variable.
        """
        # Private: no public function records a read of which the gradient is known.
        resource_variable_ops.variable_accessed(self)
        record.record_operation("TableLookup", [rows], [self.handle], lambda output: [gradient(output)])
        return rows

    def is_recorded(self) -> bool:
        """Returns True if a gradient tape would record a look-up now."""
        # Private: there is no public way to ask.
        resource_variable_ops.variable_accessed(self)
        return bool(record.should_record_backprop([self.handle]))

    def _serialize_to_tensors(self) -> dict[str, Any]:
        # Private: what a checkpoint has of a variable; of this one nothing, as the table saves the rows.
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
