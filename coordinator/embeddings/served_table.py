"""A table as it is in a SavedModel: plain operations and variables, which are filled from files when it is loaded.

assets/table_0.index, .data-...          keys, sorted by hash, and rows
assets/table_0_changes.index, .data-...  in a delta: what has changed since; looked at first
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from coordinator.embeddings.exported_rows import stored_dtype
from coordinator.embeddings.keys import as_integers, hash_position


class ServedTable(tf.Module):
    """Looks keys up as `Table.lookup` does without training. Created outside of a strategy's scope.

    Args:
      indexes: the paths of the `.index` files that `write_rows` has made, the newest first.
      dim: the length of a row.
      dtype: of the rows in the files.
    """

    def __init__(self, indexes: Sequence[str], dim: int, dtype: tf.DType) -> None:
        super().__init__("table")
        self._dim = dim
        self._parts = [_Rows(path, dim, dtype) for path in indexes]

    def lookup(self, keys: Any) -> Any:
        """Returns the rows of keys, float32, of the shape of `keys` and one more dimension."""
        keys = as_integers(keys)
        positions = hash_position(tf.reshape(keys, [-1]))
        # The oldest has the default for what no part has.
        rows = None
        for part in reversed(self._parts):
            is_there, mine = part.find(positions)
            rows = mine if rows is None else tf.where(is_there[:, tf.newaxis], mine, rows)
        rows = tf.reshape(tf.cast(rows, tf.float32), tf.concat([tf.shape(keys), [self._dim]], 0))
        return tf.ensure_shape(rows, [*keys.shape, self._dim])


class _Rows(tf.Module):
    """The keys and rows of some files."""

    def __init__(self, index: str, dim: int, dtype: tf.DType) -> None:
        super().__init__("rows")
        self._positions = tf.Variable(tf.zeros([0], tf.int64), shape=[None], trainable=False)
        self._rows = tf.Variable(tf.zeros([0, dim], dtype), shape=[None, dim], trainable=False)
        # Attributes of a module, so that TensorFlow copies the file, and finds it where the SavedModel is loaded.
        self._index = tf.saved_model.Asset(index)
        self._loader = _Loader(self._index, self._positions, self._rows)

    def find(self, positions: Any) -> tuple[Any, Any]:
        """Returns which keys are there, by their `hash_position`; and rows, the default for those that are not."""
        known = self._positions.read_value()
        # The last one is that of no key.
        end = tf.size(known, tf.int64) - 1
        at = tf.searchsorted(known, positions, out_type=tf.int64)
        is_there = tf.logical_and(at < end, tf.gather(known, at) == positions)
        return is_there, tf.gather(self._rows, tf.where(is_there, at, end))


class _Loader(tf.saved_model.experimental.TrackableResource):
    """Fills variables when a SavedModel has been loaded, after its own variables have been restored."""

    def __init__(self, index: tf.saved_model.Asset, positions: tf.Variable, rows: tf.Variable) -> None:
        super().__init__()
        self._index, self._positions, self._rows = index, positions, rows

    def _create_resource(self) -> Any:
        # A resource is required, and not used.
        return tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.int64)

    def _initialize(self) -> None:
        prefix = tf.strings.regex_replace(self._index.asset_path, r"\.index$", "")
        dtype = self._rows.dtype
        keys, rows = tf.raw_ops.RestoreV2(
            prefix=prefix,
            tensor_names=["keys", "rows"],
            shape_and_slices=["", ""],
            dtypes=[tf.int64, stored_dtype(dtype)],
        )
        # So that a look-up finds one that is not less than any other.
        positions = tf.concat([hash_position(tf.ensure_shape(keys, [None])), [tf.int64.max]], 0)
        self._positions.assign(positions, read_value=False)
        self._rows.assign(tf.ensure_shape(tf.bitcast(rows, dtype), self._rows.shape), read_value=False)
