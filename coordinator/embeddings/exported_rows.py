"""Files with keys and rows of a table, which the parameter servers write, each its own part, in blocks.

    server 0: keys of its part of the hash values, sorted by hash --+
                blocks of at most 16 MB: keys, rows                 |--> one checkpoint: `keys` [n], `rows` [n + 1, dim]
    server 1: the following part                                  --+      sorted, since servers have ranges of hashes

The last row is the default, of no key. Nothing of the rows passes the client, and no row number leaves a server: a
block's rows are looked up when it is written, as any rows are. Training may go on meanwhile: each row is of one moment,
blocks are of different ones, and a key that was evicted in between is written with the default.

Rows of float16 are stored as int16, since TensorFlow cannot read float16 in pieces.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from coordinator.embeddings.keys import in_hash_order
from coordinator.embeddings.shard_storage import CLOCK, SLICE, USED

if TYPE_CHECKING:
    from coordinator.embeddings.table import Table
    from coordinator.embeddings.table_shard import TableShard

DTYPES = (tf.float32, tf.float16)
_BLOCK_BYTES = 2**24
_NUMBER = tf.TensorSpec([], tf.int64)
_TEXT = tf.TensorSpec([], tf.string)
_KEYS = tf.TensorSpec([None], tf.int64)


@dataclasses.dataclass(frozen=True)
class Written:
    """What is in the files of a table.

    Attributes:
      sizes: the number of keys of each server.
      clocks: the `CLOCK` of each server before its keys were read.
      history: that of the table, see `Table`; empty in files of a version that did not write it.
    """

    sizes: list[int]
    clocks: list[int]
    history: str = ""


@dataclasses.dataclass(frozen=True)
class Base:
    """Files that were written before; only what has changed since is written.

    Attributes:
      prefix: of the files.
      written: what is in them.
    """

    prefix: str
    written: Written


def write_rows(table: "Table", prefix: str, dtype: tf.DType, base: Base | None = None) -> Written:
    """Writes the keys of a table that have rows, and these rows; called on the client.

    Args:
      table: any.
      prefix: of the files, in a folder that exists, and that all parameter servers can write.
      dtype: of the rows, one of `DTYPES`.
      base: if given, only keys that have got a row or a gradient since are written, and those that it has and that have
        no row any more, with the default.
    """
    history = table.history
    shards = [_ShardRows(shard, dtype) for shard in table.shards]
    firsts = [sum(base.written.sizes[:number]) for number in range(len(shards))] if base else []
    clocks, keys = [], []
    for number, shard in enumerate(shards):
        clocks.append(shard.clock())
        if base is None:
            keys.append(shard.changed(tf.constant(0, tf.int64)))
        else:
            changed = shard.changed(tf.constant(base.written.clocks[number], tf.int64))
            size, total = base.written.sizes[number], sum(base.written.sizes)
            keys.append(shard.with_removed(changed, base.prefix, firsts[number], size, total))
    sizes = [int(shard.size(each)) for shard, each in zip(shards, keys, strict=True)]
    prefixes: list[str] = []
    first = 0
    for number, (shard, mine, size) in enumerate(zip(shards, keys, sizes, strict=True)):
        prefixes += shard.write(mine, size, first, sum(sizes), f"{prefix}-{number}")
        first += size
    prefixes.append(f"{prefix}-default")
    default = _as_stored(tf.fill([1, table.dim], table.default), dtype)
    end = sum(sizes)
    _save(prefixes[-1], ["rows"], [f"{end + 1} {table.dim} {end},1:-"], [default])
    if not end:
        _save(f"{prefix}-keys", ["keys"], [""], [tf.zeros([0], tf.int64)])
        prefixes.append(f"{prefix}-keys")
    with tf.device("/device:CPU:0"):
        tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=prefixes, destination_prefix=prefix, delete_old_dirs=False)
    return Written(sizes, clocks, history)


class _ShardRows:
    """Writes the rows of one server; what it returns stays there."""

    def __init__(self, shard: "TableShard", dtype: tf.DType) -> None:
        self._shard = shard
        self._storage = shard.storage
        self._dtype = dtype
        self._dim = shard.storage.dim
        self._functions: dict[Any, Any] = {}

    def _call(self, method: Callable[..., Any], signature: list[tf.TensorSpec], *arguments: Any) -> Any:
        function = self._functions.setdefault(method, tf.function(method, signature, autograph=False))
        with tf.device(self._shard.device):
            return function(*arguments)

    def clock(self) -> int:
        return int(self._storage.read_counts()[CLOCK])

    def size(self, keys: Any) -> Any:
        return self._call(lambda keys: tf.size(keys, tf.int64), [_KEYS], keys)

    def changed(self, since: Any) -> Any:
        """Returns the keys whose stamps are at least `since`, sorted, each once."""
        return self._call(self._changed, [_NUMBER], since)

    def _changed(self, since: Any) -> Any:
        storage = self._storage

        def read(first: Any) -> Any:
            # Under the mutex, so that keys and stamps are of the same rows.
            with storage.mutex.hold([first]):
                numbers = tf.range(first, tf.minimum(first + SLICE, storage.counts.sparse_read(USED)))
                is_changed = storage.stamp.sparse_read(numbers) >= since
                return tf.boolean_mask(storage.key_of.sparse_read(numbers), is_changed)

        return in_hash_order(_collected(read, storage.counts.sparse_read(USED)))

    def with_removed(self, keys: Any, prefix: str, first: int, size: int, total: int) -> Any:
        """Adds the keys of this server in other files that have no row any more; sorted.

        Args:
          keys: to which they are added.
          prefix: of the files.
          first: the position of this server's keys in them.
          size: their number.
          total: the number of all keys in them.
        """
        numbers = [tf.constant(each, tf.int64) for each in (first, size, total)]
        return self._call(self._with_removed, [_KEYS, _TEXT, *[_NUMBER] * 3], keys, tf.constant(prefix), *numbers)

    def _with_removed(self, keys: Any, prefix: Any, start: Any, size: Any, total: Any) -> Any:
        storage = self._storage

        def read(first: Any) -> Any:
            length = tf.minimum(tf.constant(SLICE, tf.int64), size - first)
            spec = tf.strings.format("{} {},{}", (total, start + first, length))
            known = tf.raw_ops.RestoreV2(
                prefix=prefix, tensor_names=["keys"], shape_and_slices=tf.reshape(spec, [1]), dtypes=[tf.int64]
            )[0]
            with storage.mutex.hold([known]):
                return tf.boolean_mask(known, storage.find(tf.ensure_shape(known, [None])) < 0)

        return in_hash_order(tf.concat([keys, _collected(read, size)], 0))

    def write(self, keys: Any, size: int, first: int, total: int, prefix: str) -> list[str]:
        """Writes keys and their rows in blocks; returns the prefixes of their files.

        Args:
          keys: as the methods return them.
          size: their number.
          first: their position among those of all servers.
          total: the number of these.
          prefix: of the prefixes.
        """
        block = max(1, _BLOCK_BYTES // (self._dim * 4 + 8))
        prefixes: list[str] = []
        for begin in range(0, size, block):
            length = min(block, size - begin)
            prefixes.append(f"{prefix}-{len(prefixes):05}")
            at = first + begin
            texts = (prefixes[-1], f"{total} {at},{length}", f"{total + 1} {self._dim} {at},{length}:-")
            numbers = (tf.constant(begin, tf.int64), tf.constant(length, tf.int64))
            written = self._call(
                self._write, [_KEYS, _NUMBER, _NUMBER, *[_TEXT] * 3], keys, *numbers, *map(tf.constant, texts)
            )
            # The call may return before it has run.
            written.numpy()
        return prefixes

    def _write(self, keys: Any, begin: Any, length: Any, prefix: Any, keys_slice: Any, rows_slice: Any) -> Any:
        keys = keys[begin : begin + length]
        rows = _as_stored(self._shard.lookup(keys, training=False), self._dtype)
        saved = _save(prefix, ["keys", "rows"], tf.stack([keys_slice, rows_slice]), [keys, rows])
        # A function does not run operations that write files, unless what it returns depends on them.
        with tf.control_dependencies([saved]):
            return tf.identity(prefix)


def stored_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which files have rows of a dtype."""
    return tf.int16 if dtype == tf.float16 else dtype


def _as_stored(rows: Any, dtype: tf.DType) -> Any:
    return tf.bitcast(tf.cast(rows, dtype), stored_dtype(dtype))


def _save(prefix: Any, names: list[str], slices: Any, tensors: list[Any]) -> Any:
    return tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=slices, tensors=tensors)


def _collected(read: Callable[[Any], Any], size: Any) -> Any:
    """Concatenates the keys that `read` returns for each slice of `size` numbers."""
    slices = -(-size // SLICE)
    array = tf.TensorArray(tf.int64, tf.cast(slices, tf.int32), infer_shape=False, element_shape=[None])

    def add(number: Any, array: Any) -> tuple[Any, Any]:
        return number + 1, array.write(tf.cast(number, tf.int32), read(number * SLICE))

    start = tf.constant(0, tf.int64)
    _, array = tf.while_loop(lambda number, _: number < slices, add, [start, array], parallel_iterations=1)
    return tf.cond(slices > 0, array.concat, lambda: tf.zeros([0], tf.int64))
