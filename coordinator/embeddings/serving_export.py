"""Exports models with tables as SavedModels for TensorFlow Serving, and as deltas with only the changes.

saved_model.pb, variables/               the model; its small variables go through the client
assets/table_0.index, .data-...          keys and rows of a table
assets/table_0_changes.index, .data-...  in a delta: the changes since the former export, which are looked up first
assets.extra/coordinator.json            the record of the files that `export_delta` needs

Each parameter server writes its keys and rows of a table, in blocks:

    server 0: keys of its part of the hash values, sorted by hash --+
                blocks of at most 16 MB: keys, rows                 |--> one checkpoint: `keys` [n], `rows` [n + 1, dim]
    server 1: the following part                                  --+      sorted, since servers have ranges of hashes

The last row is the default and has no key. Rows do not pass through the client. Row numbers do not leave a server,
because the server looks up the rows of a block when it writes the block. If training goes on, each row is consistent,
but blocks are of different times. If a key is evicted after its block was chosen, the key is written with the default.

Rows of float16 are stored as int16, because TensorFlow cannot read slices of float16 tensors.
"""

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from coordinator.addresses import checkpoint_path
from coordinator.embeddings.table import Table
from coordinator.embeddings.table_settings import as_integers, hash_position, in_hash_order
from coordinator.embeddings.table_shard import SLICE, Count, TableShard
from coordinator.ps_strategy.keras.internals.optimizers import variable_of
from coordinator.ps_strategy.keras.internals.patches import structured_inputs
from coordinator.ps_strategy.keras.internals.row_updates import is_table
from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced

_DTYPES = (tf.float32, tf.float16)
_BLOCK_BYTES = 2**24
_FORMAT = 1
_RECORD = os.path.join("assets.extra", "coordinator.json")
# The folder of keys and rows until TensorFlow has copied their indexes to the assets.
_FILES = "files"

_NUMBER = tf.TensorSpec([], tf.int64)
_TEXT = tf.TensorSpec([], tf.string)
_KEYS = tf.TensorSpec([None], tf.int64)


def export(model: keras.Model, path: str | os.PathLike[str], dtype: Any = None, *, serve: Any = None) -> None:
    """Writes a SavedModel of a model with its tables, with the signature `serving_default`.

    The SavedModel has only operations of TensorFlow, so that TensorFlow Serving and `tf.saved_model.load` load it
    without this library. Keys without a row get the table's default. Each parameter server writes its rows in blocks,
    which do not pass through the client. If training goes on, blocks have rows of different times.

    Args:
      model: a model with `Embedding` layers, in the form for prediction.
      path: a folder that does not exist. The files are written to a new folder next to `path`, whose name ends in
        `.part` and which is renamed at the end. The client and all parameter servers must be able to write there. For
        TensorFlow Serving, the name of the folder must be the version number.
      dtype: the dtype of the rows in the files and in the serving memory: float32, or float16 for half the size.
        Look-ups always return float32.
      serve: a `tf.function` with an input signature, which takes tensors, calls the model and returns tensors. `serve`
        is exported instead of the model's call. Models that are neither functional nor `Sequential`, or have ragged or
        sparse inputs, need this argument.

    Raises:
      RuntimeError: `export` is called inside a strategy's scope.
      ValueError: an argument is wrong, or the model has no table.
      FileExistsError: `path` exists.
    """
    dtype = tf.as_dtype(dtype or tf.float32)
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be float32 or float16, got {dtype.name}.")
    _export(model, path, dtype, serve, None)


def export_delta(
    model: keras.Model, path: str | os.PathLike[str], base: str | os.PathLike[str], *, serve: Any = None
) -> None:
    """Writes a SavedModel with the files of a former export, and new files only for the changes since that export.

    The SavedModel is complete, and is loaded as any other. The new files have the keys that have got a row or a
    gradient; the keys that have lost their row, with the default row; and the model's other variables. The files of the
    former export are hard links, or copies on file systems without hard links. To update a server that has the former
    export, send only the new files: `rsync --archive --link-dest=../1 2/ server:/models/ads/2/`.

    Args:
      model: see `export`.
      path: see `export`.
      base: the path of an `export` of the same tables, written after the tables were last created or restored.
      serve: see `export`.

    Raises:
      RuntimeError, FileExistsError: see `export`.
      ValueError: an argument is wrong, or `base` is not such an export.
    """
    _export(model, path, None, serve, checkpoint_path(base))


@dataclasses.dataclass(frozen=True)
class Written:
    """The content of a table's files: for each server, the number of keys, and the `CLOCK` before the keys were read.

    `history` is `Table.history`, or empty in files of a release without histories.
    """

    sizes: list[int]
    clocks: list[int]
    history: str = ""


def write_rows(table: Table, prefix: str, dtype: tf.DType, base: tuple[str, Written] | None = None) -> Written:
    """Writes all keys and rows of a table, with a dtype of `_DTYPES`. Called on the client.

    The folder of the files' `prefix` must exist, and all parameter servers must be able to write there. `base` has the
    prefix and the content of former files. The new files then have only the keys that have got a row or gradient since
    the former files were written, and keys of the former files that have lost their row, with the default row.
    """
    history = table.history
    shards = [_ShardRows(shard, dtype) for shard in table.shards]
    clocks, keys, sizes = [], [], []
    for number, shard in enumerate(shards):
        clocks.append(int(table.shards[number].read_counts()[Count.CLOCK]))
        if base is None:
            mine, size = shard.changed(0)
        else:
            former, known = base
            mine, _ = shard.changed(known.clocks[number])
            place = sum(known.sizes[:number]), known.sizes[number], sum(known.sizes)
            mine, size = shard.with_removed(mine, former, *place)
        keys.append(mine)
        sizes.append(int(size))
    end = sum(sizes)
    prefixes: list[str] = []
    for number, shard in enumerate(shards):
        prefixes += shard.write(keys[number], sizes[number], sum(sizes[:number]), end, f"{prefix}-{number}")
    prefixes.append(f"{prefix}-default")
    default = _as_stored(tf.fill([1, table.dim], table.default), dtype)
    _save_rows(prefixes[-1], ["rows"], [f"{end + 1} {table.dim} {end},1:-"], [default])
    if not end:
        _save_rows(f"{prefix}-keys", ["keys"], [""], [tf.zeros([0], tf.int64)])
        prefixes.append(f"{prefix}-keys")
    with tf.device("/device:CPU:0"):
        tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=prefixes, destination_prefix=prefix, delete_old_dirs=False)
    return Written(sizes, clocks, history)


class _ShardRows:
    """Writes one server's rows. Methods return unique keys on the server, sorted by hash, and the number of keys."""

    def __init__(self, shard: TableShard, dtype: tf.DType) -> None:
        self._shard = shard
        self._dtype = dtype
        self.changed = self._on_server(self._changed, [_NUMBER])
        self.with_removed = self._on_server(self._with_removed, [_KEYS, _TEXT, *[_NUMBER] * 3])
        self._write_block = self._on_server(self._written, [_KEYS, _NUMBER, _NUMBER, *[_TEXT] * 3])

    def _on_server(self, method: Callable[..., Any], signature: list[tf.TensorSpec]) -> Callable[..., Any]:
        function = tf.function(method, signature, autograph=False)

        def call(*arguments: Any) -> Any:
            with tf.device(self._shard.device):
                return function(*arguments)

        return call

    def _changed(self, since: Any) -> tuple[Any, Any]:
        """Returns the keys whose stamps are at least `since`."""
        shard = self._shard

        def read(first: Any) -> Any:
            # The mutex makes keys and stamps belong to the same rows.
            with shard.mutex.hold([first]):
                numbers = tf.range(first, tf.minimum(first + SLICE, shard.counts.sparse_read(Count.USED)))
                is_changed = shard.stamp.sparse_read(numbers) >= since
                return tf.boolean_mask(shard.key_of.sparse_read(numbers), is_changed)

        return _sorted(_collected(read, shard.counts.sparse_read(Count.USED)))

    def _with_removed(self, keys: Any, prefix: Any, start: Any, size: Any, total: Any) -> tuple[Any, Any]:
        """Adds keys of former files that have lost their row. The server has `size` of `total` keys, from `start`."""
        shard = self._shard

        def read(first: Any) -> Any:
            length = tf.minimum(tf.constant(SLICE, tf.int64), size - first)
            spec = tf.strings.format("{} {},{}", (total, start + first, length))
            known = tf.raw_ops.RestoreV2(
                prefix=prefix, tensor_names=["keys"], shape_and_slices=tf.reshape(spec, [1]), dtypes=[tf.int64]
            )[0]
            with shard.mutex.hold([known]):
                return tf.boolean_mask(known, shard.find(tf.ensure_shape(known, [None])) < 0)

        return _sorted(tf.concat([keys, _collected(read, size)], 0))

    def write(self, keys: Any, size: int, first: int, total: int, prefix: str) -> list[str]:
        """Writes `size` of `total` keys and their rows in blocks, from position `first`. Returns the file prefixes."""
        dim = self._shard.dim
        block = max(1, _BLOCK_BYTES // (dim * 4 + 8))
        prefixes: list[str] = []
        for begin in range(0, size, block):
            length = min(block, size - begin)
            prefixes.append(f"{prefix}-{len(prefixes):05}")
            keys_slice = f"{total} {first + begin},{length}"
            rows_slice = f"{total + 1} {dim} {first + begin},{length}:-"
            written = self._write_block(keys, begin, length, prefixes[-1], keys_slice, rows_slice)
            # The call may return before the server has written the block.
            written.numpy()
        return prefixes

    def _written(self, keys: Any, begin: Any, length: Any, prefix: Any, keys_slice: Any, rows_slice: Any) -> Any:
        keys = keys[begin : begin + length]
        rows = _as_stored(self._shard.lookup(keys, training=False), self._dtype)
        saved = _save_rows(prefix, ["keys", "rows"], tf.stack([keys_slice, rows_slice]), [keys, rows])
        # A function runs operations that write files only if its result depends on them.
        with tf.control_dependencies([saved]):
            return tf.identity(prefix)


def _stored_dtype(dtype: tf.DType) -> tf.DType:
    return tf.int16 if dtype == tf.float16 else dtype


def _as_stored(rows: Any, dtype: tf.DType) -> Any:
    return tf.bitcast(tf.cast(rows, dtype), _stored_dtype(dtype))


def _save_rows(prefix: Any, names: list[str], slices: Any, tensors: list[Any]) -> Any:
    return tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=slices, tensors=tensors)


def _sorted(keys: Any) -> tuple[Any, Any]:
    keys = in_hash_order(keys)
    return keys, tf.size(keys, tf.int64)


def _collected(read: Callable[[Any], Any], size: Any) -> Any:
    """Concatenates the keys that `read` returns for each slice of `size` numbers."""
    slices = -(-size // SLICE)
    array = tf.TensorArray(tf.int64, tf.cast(slices, tf.int32), infer_shape=False, element_shape=[None])

    def add(number: Any, array: Any) -> tuple[Any, Any]:
        return number + 1, array.write(tf.cast(number, tf.int32), read(number * SLICE))

    start = tf.constant(0, tf.int64)
    _, array = tf.while_loop(lambda number, _: number < slices, add, [start, array], parallel_iterations=1)
    return tf.cond(slices > 0, array.concat, lambda: tf.zeros([0], tf.int64))


class ServedTable(tf.Module):
    """Looks up keys like `Table.lookup` without training. Created outside of a strategy's scope.

    `indexes` are paths of `.index` files of `write_rows`, the newest first, with rows of `dtype`.
    """

    def __init__(self, indexes: Sequence[str], dim: int, dtype: tf.DType) -> None:
        super().__init__("table")
        self._dim = dim
        self._parts = [_Rows(path, dim, dtype) for path in indexes]

    def lookup(self, keys: Any) -> Any:
        """Returns the rows of keys, float32, of the shape of `keys` with one more dimension."""
        keys = as_integers(keys)
        positions = hash_position(tf.reshape(keys, [-1]))
        # The oldest part has the default for keys that no part has.
        *newer, oldest = self._parts
        _, rows = oldest.find(positions)
        for part in reversed(newer):
            is_there, newer_rows = part.find(positions)
            rows = tf.where(is_there[:, tf.newaxis], newer_rows, rows)
        rows = tf.reshape(tf.cast(rows, tf.float32), tf.concat([tf.shape(keys), [self._dim]], 0))
        return tf.ensure_shape(rows, [*keys.shape, self._dim])


class _Rows(tf.Module):
    def __init__(self, index: str, dim: int, dtype: tf.DType) -> None:
        super().__init__("rows")
        self._positions = tf.Variable(tf.zeros([0], tf.int64), shape=[None], trainable=False)
        self._rows = tf.Variable(tf.zeros([0, dim], dtype), shape=[None, dim], trainable=False)
        # The asset is an attribute of a module, so that TensorFlow copies the file, and finds the copy after loading.
        self._index = tf.saved_model.Asset(index)
        self._loader = _Loader(self._index, self._positions, self._rows)

    def find(self, positions: Any) -> tuple[Any, Any]:
        """Returns, for each key's `hash_position`, whether this part has the key, and the key's row or the default."""
        known = self._positions.read_value()
        # The last position has no key.
        end = tf.size(known, tf.int64) - 1
        at = tf.searchsorted(known, positions, out_type=tf.int64)
        is_there = tf.logical_and(at < end, tf.gather(known, at) == positions)
        return is_there, tf.gather(self._rows, tf.where(is_there, at, end))


class _Loader(tf.saved_model.experimental.TrackableResource):
    """Fills variables when a SavedModel is loaded, after TensorFlow has restored the SavedModel's variables."""

    def __init__(self, index: tf.saved_model.Asset, positions: tf.Variable, rows: tf.Variable) -> None:
        super().__init__()
        self._index, self._positions, self._rows = index, positions, rows

    def _create_resource(self) -> Any:
        # TensorFlow requires a resource, which is not used.
        return tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.int64)

    def _initialize(self) -> None:
        prefix = tf.strings.regex_replace(self._index.asset_path, r"\.index$", "")
        dtype = self._rows.dtype
        keys, rows = tf.raw_ops.RestoreV2(
            prefix=prefix,
            tensor_names=["keys", "rows"],
            shape_and_slices=["", ""],
            dtypes=[tf.int64, _stored_dtype(dtype)],
        )
        # The last position is the largest, so that every look-up finds a position.
        positions = tf.concat([hash_position(tf.ensure_shape(keys, [None])), [tf.int64.max]], 0)
        self._positions.assign(positions, read_value=False)
        self._rows.assign(tf.ensure_shape(tf.bitcast(rows, dtype), self._rows.shape), read_value=False)


def _export(model: keras.Model, path: str | os.PathLike[str], dtype: Any, serve: Any, base: str | None) -> None:
    if tf.distribute.has_strategy():
        raise RuntimeError("Export a model outside of strategy.scope(): what is created for it belongs to the client.")
    path = checkpoint_path(path).rstrip("/")
    if tf.io.gfile.exists(path):
        raise FileExistsError(f"{path} exists. A SavedModel is exported to a new folder, such as the next version.")
    tables = [variable.table for variable in model.variables if is_table(variable)]
    if not tables:
        raise ValueError(f"The model {model.name!r} has no Embedding layer of a table. Export it with model.export.")
    function = _serving_function(model, serve)
    former: Mapping[str, Written] | None = None
    if base is not None:
        dtype, former = _read_record(base, tables)
    # The folder has a new name, because an existing folder may belong to another program.
    folder = f"{path}.{secrets.token_hex(8)}.part"
    tf.io.gfile.makedirs(folder)
    try:
        served, written = _write_tables(tables, dtype, folder, former, base)
        _save_model(model, function, served, folder)
        _move_data(folder)
        if former is None:
            content = {"format": _FORMAT, "dtype": dtype.name, "tables": written}
            tf.io.gfile.makedirs(os.path.dirname(os.path.join(folder, _RECORD)))
            with tf.io.gfile.GFile(os.path.join(folder, _RECORD), "w") as file:
                json.dump(content, file, indent=1)
        tf.io.gfile.rename(folder, path)
    except BaseException:
        with contextlib.suppress(tf.errors.OpError):
            tf.io.gfile.rmtree(folder)
        raise


def _read_record(path: str, tables: Sequence[Table]) -> tuple[tf.DType, dict[str, Written]]:
    """Returns the dtype and each table's `Written` of a former export. Raises ValueError if that is no base."""
    try:
        with tf.io.gfile.GFile(os.path.join(path, _RECORD)) as file:
            content = json.load(file)
    except tf.errors.NotFoundError:
        content = {}
    if content.get("format") != _FORMAT:
        raise ValueError(
            f"{path} is not what coordinator.embeddings.export writes. The base of a delta is a whole export, no "
            "other delta."
        )
    former = {name: Written(**written) for name, written in content["tables"].items()}
    for table in tables:
        if table.name not in former or former[table.name].history != table.history:
            raise ValueError(
                f"The former export is no base for a delta of the table {table.name!r} as it is now: it is of another "
                "table or program, or before the table was restored, or lost with a parameter server. Call export, and "
                "use that as the base."
            )
    return tf.as_dtype(content["dtype"]), former


def _write_tables(
    tables: Sequence[Table], dtype: Any, folder: str, former: Mapping[str, Written] | None, base: str | None
) -> tuple[dict[Table, "ServedTable"], dict[str, Any]]:
    """Writes keys and rows. Returns the `ServedTable` of each table, and for a whole export each table's `Written`."""
    files = os.path.join(folder, _FILES)
    tf.io.gfile.makedirs(files)
    served, written = {}, {}
    for number, table in enumerate(tables):
        prefix = os.path.join(files, f"table_{number}")
        indexes = [f"{prefix}.index"]
        if former is None or base is None:
            written[table.name] = dataclasses.asdict(write_rows(table, prefix, dtype))
        else:
            assets, name = os.path.join(base, "assets"), f"table_{list(former).index(table.name)}"
            for file in tf.io.gfile.listdir(assets):
                if file.startswith(f"{name}."):
                    path, new = os.path.join(assets, file), prefix + file[len(name) :]
                    try:
                        os.link(path, new)
                    except OSError:
                        tf.io.gfile.copy(path, new)
            write_rows(table, f"{prefix}_changes", dtype, (prefix, former[table.name]))
            indexes.insert(0, f"{prefix}_changes.index")
        served[table] = ServedTable(indexes, table.dim, dtype)
    return served, written


def _serving_function(model: keras.Model, serve: Any) -> Any:
    if serve is not None:
        signature = getattr(serve, "input_signature", None)
        if signature is None:
            raise ValueError("serve must be a tf.function with an input_signature.")
        return tf.function(serve.python_function, input_signature=signature)
    inputs = structured_inputs(model)
    if inputs is None or any(part.sparse or part.ragged for part in tf.nest.flatten(inputs)):
        raise ValueError(
            f"The model {model.name!r} does not say which tensors it takes, or takes ragged or sparse ones. Give "
            "serve=, a tf.function with an input_signature that takes tensors and calls the model."
        )
    specs = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape, part.dtype, part.name), inputs)

    def call(inputs: Any) -> Any:
        outputs = model(inputs)
        if isinstance(outputs, dict):
            return outputs
        return {f"output_{number}": output for number, output in enumerate(tf.nest.flatten(outputs))}

    return tf.function(call, input_signature=[specs])


def _lookup_in(thread: int, served: ServedTable, lookup: Callable[..., Any], keys: Any, training: bool = False) -> Any:
    """Looks up keys in the exported table on one thread. Steps that other threads trace use the table itself."""
    return served.lookup(keys) if threading.get_ident() == thread else lookup(keys, training)


def _save_model(model: keras.Model, function: Any, served: dict[Table, ServedTable], folder: str) -> None:
    module = tf.Module("model")
    module.tables = list(served.values())
    module.model_variables = [variable_of(variable) for variable in model.variables if not is_table(variable)]
    module.serve = function
    with contextlib.ExitStack() as stack:
        for table, exported in served.items():
            lookup = functools.partial(_lookup_in, threading.get_ident(), exported, table.lookup)
            stack.enter_context(attribute_replaced(table, "lookup", lookup))
        # `tf.saved_model.save` traces functions again, so the look-ups stay replaced.
        tf.saved_model.save(module, folder, signatures=function.get_concrete_function())


def _move_data(folder: str) -> None:
    """Moves the data of tables to the assets, where TensorFlow has copied the indexes."""
    files = os.path.join(folder, _FILES)
    for name in tf.io.gfile.listdir(files):
        table, _, kind = name.partition(".")
        if kind.startswith("data-") and tf.io.gfile.exists(os.path.join(folder, "assets", f"{table}.index")):
            tf.io.gfile.rename(os.path.join(files, name), os.path.join(folder, "assets", name))
    tf.io.gfile.rmtree(files)
