"""Look-ups of rows in Keras' variables, which read these rows instead of the whole table."""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

_logger = logging.getLogger("coordinator")


@contextlib.contextmanager
def rows_read_alone() -> Iterator[None]:
    """A scope in which `keras.ops.take`, and so `keras.layers.Embedding`, reads single rows of a variable on a server.

    As Keras has it, the whole table travels to the worker at each look-up: `ops.take` converts it to a tensor twice,
    once to learn its shape. Gradients are `tf.IndexedSlices` with and without. Variables that are on no parameter
    server, indices that are sparse tensors, and other axes than the first are looked up as ever.
    """
    # Private: TensorFlow looks up single rows of what has a `sparse_read`, and a variable of Keras has none; a look-up
    # cannot be told from other conversions to a tensor, and nothing public comes before it.
    take = backend.numpy.take
    if list(inspect.signature(take).parameters) != ["x", "indices", "axis"]:
        _logger.warning("Embeddings are read as a whole in each step: this Keras (%s) is not known.", keras.__version__)
        yield
        return
    backend.numpy.take = functools.wraps(take)(functools.partial(_take, take))
    try:
        yield
    finally:
        backend.numpy.take = take


def _take(take: Callable[..., Any], x: Any, indices: Any, axis: int | None = None) -> Any:
    """`keras.ops.take`, which was `take`."""
    table = _table_on_server(x) if axis == 0 and not isinstance(indices, tf.SparseTensor) else None
    if table is None:
        return take(x, indices, axis=axis)
    ids = indices if isinstance(indices, tf.RaggedTensor) else tf.convert_to_tensor(indices)
    if ids.dtype not in (tf.int32, tf.int64):
        return take(x, indices, axis=axis)
    return tf.ragged.map_flat_values(lambda flat: _rows(x, table, flat), ids)


def _rows(variable: Any, table: tf.Variable, ids: Any) -> Any:
    """Some rows of what is behind a variable of Keras; negative indices count from the end, as ever in Keras."""
    rows = tf.gather(table, tf.where(ids < 0, ids + table.shape[0], ids))
    # Private: asking for the value in mixed precision would read and cast all of it.
    return variable._maybe_autocast(rows)


def _table_on_server(value: Any) -> tf.Variable | None:
    """The TensorFlow variable behind one of Keras, if it is on a parameter server and nothing stands for its value."""
    # Private: in a stateless scope a variable may have another value, and `value` would cast in mixed precision.
    if not isinstance(value, keras.Variable) or backend.in_stateless_scope():
        return None
    table = value._value
    is_known = isinstance(table, tf.Variable) and table.shape.rank and table.shape[0] is not None
    return table if is_known and tf.DeviceSpec.from_string(table.device).job == "ps" else None
