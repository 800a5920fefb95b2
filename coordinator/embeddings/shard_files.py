"""Writes and reads slices of what one parameter server has of a table; see `TableCheckpoint`."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.embeddings.keys import BUCKETS, bucket_of, server_of
from coordinator.embeddings.shard_storage import ADMITTED, CLOCK, DROPPED, EVICTED, REFUSED, RESTORED
from coordinator.embeddings.table_shard import TableShard

KEYS_IN_SLICE = 2**17
_GROUPS = 32
# A server needs a few times as much beside the table, and steps wait while it copies and writes it.
_SLICE_BYTES = 2**20

_NUMBER, _TEXT = tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.string)


class ShardFiles:
    """Writes and reads slices on one server.

    Args:
      shard: on that server.
      number: of the server.
      servers: how many there are.

    Attributes:
      device: of the server.
      columns: the shapes of what is saved of a row, by name.
      rows_in_slice: how many rows are in a slice.
    """

    def __init__(self, shard: TableShard, number: int, servers: int) -> None:
        storage = shard.storage
        self.device = shard.device
        self.columns = {
            "keys": [],
            "rows": [storage.dim],
            **{f"slot {name}": slot.shape.as_list()[1:] for name, slot in storage.slots.items()},
            "stamps": [],
        }
        self.rows_in_slice = max(1, _SLICE_BYTES // sum(4 * math.prod(shape) for shape in self.columns.values()))
        self._shard, self._number, self._servers = shard, number, servers
        buckets = np.arange(BUCKETS)
        self._groups = np.unique(buckets[server_of(buckets, servers) == number] * _GROUPS // BUCKETS)

    def save(self, kind: str, first: int, since: int, path: str, name: str) -> None:
        """Writes a slice to a file."""
        self._save(kind)(*(tf.constant(number, tf.int64) for number in (first, since)), tf.constant(path), name)

    def load(self, kind: str, path: str, name: str, stamps: tf.DType) -> None:
        """Reads this server's part of a slice, in which stamps have the given dtype."""
        self._load(kind, stamps)(tf.constant(path), tf.constant(name))

    def evicted(self) -> int:
        """Returns how many rows the server has evicted."""
        return int(self._shard.storage.read_counts()[EVICTED])

    def settle(self, counts: np.ndarray, evicted_before: int, *, first: bool) -> int:
        """Sets the counts, of which one server has what cannot be divided, after all was read.

        Args:
          counts: those that were saved.
          evicted_before: what `evicted` returned before rows were read.
          first: whether the server has what cannot be divided.

        Returns:
          How many rows were left out because there was no room for them.
        """
        present = self._shard.storage.read_counts().numpy()
        left_out = int(present[EVICTED]) - evicted_before
        evicted = int(counts[:, EVICTED].sum() * first) + left_out
        values = {
            CLOCK: counts[:, CLOCK].max(),
            EVICTED: evicted,
            ADMITTED: present[ADMITTED] - present[EVICTED] + evicted,
            REFUSED: counts[:, REFUSED].sum() * first,
            DROPPED: counts[:, DROPPED].sum() * first,
            RESTORED: 1,
        }
        positions = [[position] for position in values]
        self._shard.storage.counts.scatter_nd_update(positions, np.array([*values.values()], np.int64))
        return left_out

    @functools.cache  # noqa: B019 - as long as the table
    def _save(self, kind: str) -> Any:
        content = self._shard.content

        @tf.function(autograph=False, input_signature=[_NUMBER, _NUMBER, _TEXT, _TEXT])
        def save(first: Any, since: Any, path: Any, name: Any) -> Any:
            with tf.device(self.device):
                if kind == "rows":
                    keys, rows, slots, stamps = content.read_rows(first, self.rows_in_slice, since)
                    columns = dict(zip(self.columns, (keys, rows, *slots, stamps), strict=True))
                elif kind == "waiting":
                    columns = dict(zip(("keys", "times"), content.read_waiting(first, KEYS_IN_SLICE), strict=True))
                else:
                    columns = {"keys": content.read_evicted(first, KEYS_IN_SLICE)}
                groups = bucket_of(columns["keys"]) * _GROUPS // BUCKETS
                parts = [tf.dynamic_partition(column, groups, _GROUPS) for column in columns.values()]
                names = _names(name, range(_GROUPS), columns)
                tensors = [part for each in zip(*parts, strict=True) for part in each]
                specs = [""] * len(tensors)
                saved = tf.raw_ops.SaveV2(prefix=path, tensor_names=names, shape_and_slices=specs, tensors=tensors)
                with tf.control_dependencies([saved]):
                    return tf.identity(path)

        return save

    @functools.cache  # noqa: B019 - as long as the table
    def _load(self, kind: str, stamps: tf.DType) -> Any:
        content = self._shard.content
        columns: dict[str, Sequence[int]] = {"keys": []}
        columns = self.columns if kind == "rows" else {"keys": [], "times": []} if kind == "waiting" else columns
        types = {"keys": tf.int64, "times": tf.int64, "stamps": stamps}

        @tf.function(autograph=False, input_signature=[_TEXT, _TEXT])
        def load(path: Any, name: Any) -> None:
            with tf.device(self.device):
                dtypes = [types.get(column, tf.float32) for column in columns] * len(self._groups)
                tensors = tf.raw_ops.RestoreV2(
                    prefix=path,
                    tensor_names=_names(name, self._groups, columns),
                    shape_and_slices=[""] * len(dtypes),
                    dtypes=dtypes,
                )
                whole = [tf.concat(tensors[place :: len(columns)], 0) for place in range(len(columns))]
                is_mine = server_of(bucket_of(tf.ensure_shape(whole[0], [None])), self._servers) == self._number
                found = [
                    tf.boolean_mask(tf.ensure_shape(column, [None, *shape]), is_mine)
                    for column, shape in zip(whole, columns.values(), strict=True)
                ]
                if kind == "rows":
                    content.write_rows(found[0], found[1], found[2:-1], tf.cast(found[-1], tf.int64))
                elif kind == "waiting":
                    content.write_waiting(*found)
                else:
                    content.remove(found[0])

        return load


def _names(name: Any, groups: Any, columns: Mapping[str, Any]) -> Any:
    # One operation: the first save of a table waits until its function has been sent to the server, and steps with it.
    return tf.strings.join([name, tf.constant([f"/{group}/{column}" for group in groups for column in columns])])
