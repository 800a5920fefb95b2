"""Combining the rows of several keys to one, as `tf.nn.embedding_lookup_sparse` does."""

from typing import Any

import tensorflow as tf

COMBINERS = ("sum", "mean", "sqrtn")


def flat_keys(keys: Any) -> Any:
    """Returns the keys without their row lengths or positions: a dense tensor."""
    if isinstance(keys, tf.RaggedTensor):
        return keys.flat_values
    return keys.values if isinstance(keys, tf.SparseTensor) else keys


def combined(rows: Any, keys: Any, weights: Any, is_used: Any, combiner: str) -> Any:
    """Combines the rows of the keys along the last dimension of the keys.

    Without keys, it is zeros.

    Args:
      rows: of `flat_keys(keys)`, with a further dimension.
      keys: a tensor, a `tf.RaggedTensor` or a `tf.SparseTensor`.
      weights: of the keys, in the same form; or None, for 1 each.
      is_used: for `flat_keys(keys)`, whether they count; or None, if all do.
      combiner: "sum"; "mean", which is divided by the sum of the weights; or "sqrtn", by the root of the sum of their
        squares.

    Returns:
      A tensor with the last dimension of the keys replaced by that of the rows; a `tf.RaggedTensor` if another
      dimension of the keys is ragged.
    """
    flat = flat_keys(keys)
    # `reshape` fails if there are not as many weights as keys.
    weights = tf.ones_like(flat, rows.dtype) if weights is None else tf.reshape(flat_keys(weights), tf.shape(flat))
    weights = tf.cast(weights, rows.dtype)
    if is_used is not None:
        weights = tf.where(is_used, weights, 0)
    sums, result = _sums(keys)
    total = sums(rows * weights[..., tf.newaxis])
    if combiner != "sum":
        divisor = sums(weights) if combiner == "mean" else tf.sqrt(sums(weights**2))
        total = tf.math.divide_no_nan(total, divisor[..., tf.newaxis])
    return result(total)


def _sums(keys: Any) -> tuple[Any, Any]:
    """Returns a function that sums what belongs to the same place, and one that arranges the sums as the keys are."""
    if isinstance(keys, tf.RaggedTensor) and keys.flat_values.shape.rank == 1:
        inner = keys
        while isinstance(inner.values, tf.RaggedTensor):
            inner = inner.values
        outer = keys.nested_row_splits[:-1]
        segments, count = inner.value_rowids(), inner.nrows()

        def arrange(sums: Any) -> Any:
            return tf.RaggedTensor.from_nested_row_splits(sums, outer, validate=False) if outer else sums

    elif isinstance(keys, tf.SparseTensor):
        shape = keys.dense_shape[:-1]
        strides = tf.math.cumprod(shape, exclusive=True, reverse=True)
        segments, count = tf.reduce_sum(keys.indices[:, :-1] * strides, axis=1), tf.reduce_prod(shape)

        def arrange(sums: Any) -> Any:
            result = tf.reshape(sums, tf.concat([shape, tf.shape(sums, tf.int64)[1:]], 0))
            return tf.ensure_shape(result, keys.shape[:-1].concatenate(sums.shape[1:]))

    else:
        # The last dimension has a uniform length.
        axis = flat_keys(keys).shape.rank - 1
        is_ragged = isinstance(keys, tf.RaggedTensor)
        return lambda x: tf.reduce_sum(x, axis), lambda sums: keys.with_flat_values(sums) if is_ragged else sums
    return lambda x: tf.math.unsorted_segment_sum(x, segments, count), arrange
