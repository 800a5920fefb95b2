"""Changes of some rows of a variable, of which none is lost when several workers change the same rows.

TensorFlow's kernels `ResourceScatterAdd`, `ResourceScatterUpdate` and so on take a variable's lock shared: two that run
at the same time may both add to what they have found in a row. `ResourceScatterNdAdd` and so on take it exclusively,
and are as fast. There are none for products and quotients.
"""

import functools
from typing import Any

import tensorflow as tf


class ExclusiveScatter:
    """A base class of variables, before TensorFlow's own, whose rows are changed by one operation at a time.

    Arguments, results and errors of the methods are those of `tf.Variable`. `scatter_mul` and `scatter_div` stay as
    they are, and may lose what another worker does to the same row. `batch_scatter_update` is exclusive in TensorFlow.
    """

    def scatter_add(self, sparse_delta: Any, use_locking: Any = False, name: str | None = None) -> Any:
        """Adds `tf.IndexedSlices` to this variable."""
        variable: Any = self
        return variable.scatter_nd_add(*_indices_and_updates(variable, sparse_delta), name)

    def scatter_sub(self, sparse_delta: Any, use_locking: Any = False, name: str | None = None) -> Any:
        """Subtracts `tf.IndexedSlices` from this variable."""
        variable: Any = self
        return variable.scatter_nd_sub(*_indices_and_updates(variable, sparse_delta), name)

    def scatter_max(self, sparse_delta: Any, use_locking: Any = False, name: str | None = None) -> Any:
        """Updates this variable with the maximum of `tf.IndexedSlices` and itself."""
        variable: Any = self
        return variable.scatter_nd_max(*_indices_and_updates(variable, sparse_delta), name)

    def scatter_min(self, sparse_delta: Any, use_locking: Any = False, name: str | None = None) -> Any:
        """Updates this variable with the minimum of `tf.IndexedSlices` and itself."""
        variable: Any = self
        return variable.scatter_nd_min(*_indices_and_updates(variable, sparse_delta), name)

    def scatter_update(self, sparse_delta: Any, use_locking: Any = False, name: str | None = None) -> Any:
        """Assigns `tf.IndexedSlices` to this variable."""
        variable: Any = self
        return variable.scatter_nd_update(*_indices_and_updates(variable, sparse_delta), name)

    def _lazy_read(self, operation: Any) -> Any:
        # Private: what an assignment returns is a variable too, of another class, which TensorFlow chooses here.
        unread: Any = super()._lazy_read(operation)  # type: ignore[misc]  # of the other base
        kind: Any = type(unread)
        unread.__class__ = _exclusive(kind)
        return unread


@functools.cache
def _exclusive(kind: Any) -> Any:
    return type(f"Exclusive{kind.__name__}", (ExclusiveScatter, kind), {"__module__": __name__})


def _indices_and_updates(variable: Any, sparse_delta: Any) -> tuple[Any, Any]:
    """The arguments of a `scatter_nd_...` that does what a `scatter_...` does with the same `tf.IndexedSlices`.

    Raises:
      TypeError: if `sparse_delta` is not a `tf.IndexedSlices`.
    """
    if not isinstance(sparse_delta, tf.IndexedSlices):
        raise TypeError(f"Argument `sparse_delta` must be a `tf.IndexedSlices`. Received arg: {sparse_delta}")
    indices = tf.convert_to_tensor(sparse_delta.indices)
    updates = tf.convert_to_tensor(sparse_delta.values, variable.dtype)
    if updates.shape.rank in (None, 0):
        # Where the variable is, so that one number is sent and not rows of it.
        with tf.device(variable.device):
            updates = _broadcast_if_scalar(updates, indices, variable)
    if indices.shape.rank in (None, 0):
        # These kernels take no single index: one more dimension before all others changes nothing.
        indices, updates = indices[tf.newaxis], updates[tf.newaxis]
    return tf.expand_dims(indices, axis=-1), updates


def _broadcast_if_scalar(updates: Any, indices: Any, variable: Any) -> Any:
    rows = tf.concat([tf.shape(indices), _shape_of_row(variable)], axis=0)
    if updates.shape.rank == 0:
        return tf.broadcast_to(updates, rows)
    return tf.broadcast_to(updates, tf.cond(tf.equal(tf.rank(updates), 0), lambda: rows, lambda: tf.shape(updates)))


def _shape_of_row(variable: Any) -> Any:
    if variable.shape.is_fully_defined():
        return tf.constant(variable.shape.as_list()[1:], tf.int32)
    return tf.raw_ops.VariableShape(input=variable.handle)[1:]
