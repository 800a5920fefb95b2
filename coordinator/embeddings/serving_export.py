"""SavedModels of models with tables, which TensorFlow Serving takes, and small ones with what has changed since.

saved_model.pb, variables/      the model; what is small goes through the client
assets/                         keys and rows of the tables, written by the parameter servers
assets.extra/coordinator.json   what `export_delta` needs to know of them

Files with keys and rows of a table, which the parameter servers write, each its own part, in blocks.

    server 0: keys of its part of the hash values, sorted by hash --+
                blocks of at most 16 MB: keys, rows                 |--> one checkpoint: `keys` [n], `rows` [n + 1, dim]
    server 1: the following part                                  --+      sorted, since servers have ranges of hashes

The last row is the default, of no key. Nothing of the rows passes the client, and no row number leaves a server: a
block's rows are looked up when it is written, as any rows are. Training may go on meanwhile: each row is of one moment,
blocks are of different ones, and a key that was evicted in between is written with the default.

Rows of float16 are stored as int16, since TensorFlow cannot read float16 in pieces.

A table as it is in a SavedModel: plain operations and variables, which are filled from files when it is loaded.

assets/table_0.index, .data-...          keys, sorted by hash, and rows
assets/table_0_changes.index, .data-...  in a delta: what has changed since; looked at first
"""

import contextlib
import dataclasses
import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from coordinator.embeddings.shard_storage import CLOCK, SLICE, USED
from coordinator.embeddings.table import Table
from coordinator.embeddings.table_settings import as_integers, hash_position, in_hash_order
from coordinator.paths import checkpoint_path
from coordinator.ps_strategy.keras.internals.optimizers import variable_of
from coordinator.ps_strategy.keras.internals.patches import structured_inputs
from coordinator.ps_strategy.keras.internals.row_updates import is_table
from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced

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
    _save_rows(prefixes[-1], ["rows"], [f"{end + 1} {table.dim} {end},1:-"], [default])
    if not end:
        _save_rows(f"{prefix}-keys", ["keys"], [""], [tf.zeros([0], tf.int64)])
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
        saved = _save_rows(prefix, ["keys", "rows"], tf.stack([keys_slice, rows_slice]), [keys, rows])
        # A function does not run operations that write files, unless what it returns depends on them.
        with tf.control_dependencies([saved]):
            return tf.identity(prefix)


def stored_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which files have rows of a dtype."""
    return tf.int16 if dtype == tf.float16 else dtype


def _as_stored(rows: Any, dtype: tf.DType) -> Any:
    return tf.bitcast(tf.cast(rows, dtype), stored_dtype(dtype))


def _save_rows(prefix: Any, names: list[str], slices: Any, tensors: list[Any]) -> Any:
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


_FORMAT = 1
_RECORD = os.path.join("assets.extra", "coordinator.json")


def export(model: keras.Model, path: str | os.PathLike[str], dtype: Any = None, *, serve: Any = None) -> None:
    """Writes a SavedModel of a model with its tables, with the signature `serving_default`.

    It has plain operations only, so TensorFlow Serving and `tf.saved_model.load` take it, without this library. Keys
    without a row get the table's default. Rows are written by the parameter servers, each its own, in blocks; they do
    not pass the client. Training may go on meanwhile; rows are then of different moments.

    Args:
      model: a model with `Embedding` layers, as it is used for prediction.
      path: a folder that does not exist; it appears when all is written. Until then, all is in a folder beside it
        whose name is new and ends in `.part`. The client and all parameter servers must be able to write there. For
        TensorFlow Serving, its name is a number, the version.
      dtype: of the rows in the files and in the server's memory: float32, or float16 for half of it. Look-ups return
        float32 either way.
      serve: a `tf.function` with an input signature that is exported instead of the model's call; for models that are
        neither functional nor `Sequential`, or have ragged or sparse inputs. It takes tensors, calls the model and
        returns tensors.

    Raises:
      RuntimeError: it is called inside a strategy's scope.
      ValueError: an argument is wrong, or the model has no table.
      FileExistsError: `path` exists.
    """
    dtype = tf.as_dtype(dtype or tf.float32)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be float32 or float16, got {dtype.name}.")
    _export(model, path, dtype, serve, None)


def export_delta(
    model: keras.Model, path: str | os.PathLike[str], base: str | os.PathLike[str], *, serve: Any = None
) -> None:
    """Writes a SavedModel that has the files of a former export, and beside them only what has changed since.

    It is a whole model: load it as any other. What is new in it are the keys that have got a row or a gradient since,
    those that lost theirs, which get the default, and all other variables. The files of the former export are links to
    it where the file system has hard links, and copies otherwise. To send it to a server that has the former export,
    send all but those: `rsync --archive --link-dest=../1 2/ server:/models/ads/2/`.

    Args:
      model: as for `export`.
      path: as for `export`.
      base: the path of what `export` wrote for the same tables since they were last created or restored.
      serve: as for `export`.

    Raises:
      RuntimeError, FileExistsError: as `export`.
      ValueError: an argument is wrong, or `base` is no such export.
    """
    _export(model, path, None, serve, checkpoint_path(base))


@dataclasses.dataclass(frozen=True)
class _Record:
    """What is remembered of an export: the dtype of its rows, and what is in the files of each table, by its name."""

    dtype: str
    tables: dict[str, Written]

    @classmethod
    def read(cls, path: str) -> "_Record":
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
        return cls(content["dtype"], {name: Written(**written) for name, written in content["tables"].items()})

    def write(self, path: str) -> None:
        content = {"format": _FORMAT, **dataclasses.asdict(self)}
        tf.io.gfile.makedirs(os.path.dirname(os.path.join(path, _RECORD)))
        with tf.io.gfile.GFile(os.path.join(path, _RECORD), "w") as file:
            json.dump(content, file, indent=1)


def _export(model: keras.Model, path: str | os.PathLike[str], dtype: Any, serve: Any, base: str | None) -> None:
    if tf.distribute.has_strategy():
        raise RuntimeError("Export a model outside of strategy.scope(): what is created for it belongs to the client.")
    path = checkpoint_path(path).rstrip("/")
    if tf.io.gfile.exists(path):
        raise FileExistsError(f"{path} exists. A SavedModel is exported to a new folder, such as the next version.")
    tables = _tables_of(model)
    function = _serving_function(model, serve)
    former = None if base is None else (_Record.read(base), os.path.join(base, "assets"))
    if former is not None:
        _check_base(former[0], tables)
        dtype = tf.as_dtype(former[0].dtype)
    # A name of its own: what is there by another name may be somebody else's.
    folder = f"{path}.{secrets.token_hex(8)}.part"
    tf.io.gfile.makedirs(folder)
    try:
        written = _write(model, function, tables, dtype, folder, former)
        if former is None:
            _Record(dtype.name, written).write(folder)
        tf.io.gfile.rename(folder, path)
    except BaseException:
        with contextlib.suppress(tf.errors.OpError):
            tf.io.gfile.rmtree(folder)
        raise


def _write(
    model: keras.Model,
    function: Any,
    tables: Sequence[Table],
    dtype: Any,
    folder: str,
    former: tuple[_Record, str] | None,
) -> dict[str, Written]:
    """Writes the SavedModel; returns what is in the files of each table, unless there is a former export."""
    files = os.path.join(folder, "files")
    tf.io.gfile.makedirs(files)
    served, written = {}, {}
    for number, table in enumerate(tables):
        prefix = os.path.join(files, f"table_{number}")
        indexes = [f"{prefix}.index"]
        if former is None:
            written[table.name] = write_rows(table, prefix, dtype)
        else:
            record, assets = former
            _link(assets, files, f"table_{list(record.tables).index(table.name)}", f"table_{number}")
            write_rows(table, f"{prefix}_changes", dtype, Base(prefix, record.tables[table.name]))
            indexes.insert(0, f"{prefix}_changes.index")
        served[table] = ServedTable(indexes, table.dim, dtype)
    _save_model(model, function, served, folder)
    _finish(folder, files)
    return written


def _tables_of(model: keras.Model) -> list[Table]:
    found = [each.table for each in model.variables if is_table(each)]
    if not found:
        raise ValueError(f"The model {model.name!r} has no Embedding layer of a table. Export it with model.export.")
    return found


def _check_base(record: _Record, tables: Sequence[Table]) -> None:
    for table in tables:
        written = record.tables.get(table.name)
        if written is None or written.history != table.history:
            raise ValueError(
                f"The former export is no base for a delta of the table {table.name!r} as it is now: it is of another "
                "table or program, or before the table was restored, or lost with a parameter server. Call export, and "
                "use that as the base."
            )


def _serving_function(model: keras.Model, serve: Any) -> Any:
    """Returns a `tf.function` with an input signature that has not been traced."""
    if serve is not None:
        signature = getattr(serve, "input_signature", None)
        if signature is None:
            raise ValueError("serve must be a tf.function with an input_signature.")
        return tf.function(serve.python_function, input_signature=signature)
    inputs = structured_inputs(model)
    if inputs is None or any(each.sparse or each.ragged for each in tf.nest.flatten(inputs)):
        raise ValueError(
            f"The model {model.name!r} does not say which tensors it takes, or takes ragged or sparse ones. Give "
            "serve=, a tf.function with an input_signature that takes tensors and calls the model."
        )
    specs = tf.nest.map_structure(lambda each: tf.TensorSpec(each.shape, each.dtype, each.name), inputs)

    def call(inputs: Any) -> Any:
        outputs = model(inputs)
        if isinstance(outputs, dict):
            return outputs
        return {f"output_{number}": each for number, each in enumerate(tf.nest.flatten(outputs))}

    return tf.function(call, input_signature=[specs])


@contextlib.contextmanager
def _lookups_replaced(served: dict[Table, ServedTable]) -> Iterator[None]:
    """A scope in which look-ups of this thread are those of the exported tables."""
    thread = threading.get_ident()

    def replacement(table: Table) -> Any:
        lookup, mine = table.lookup, served[table]

        def replaced(keys: Any, training: bool = False) -> Any:
            # Steps that are traced meanwhile use the table itself.
            return mine.lookup(keys) if threading.get_ident() == thread else lookup(keys, training)

        return replaced

    with contextlib.ExitStack() as stack:
        for table in served:
            stack.enter_context(attribute_replaced(table, "lookup", replacement(table)))
        yield


def _save_model(model: keras.Model, function: Any, served: dict[Table, ServedTable], folder: str) -> None:
    module = tf.Module("model")
    module.tables = list(served.values())
    module.model_variables = [variable_of(each) for each in model.variables if not is_table(each)]
    module.serve = function
    with _lookups_replaced(served):
        # TensorFlow traces functions again while it saves.
        tf.saved_model.save(module, folder, signatures=function.get_concrete_function())


def _link(source: str, target: str, name: str, new_name: str) -> None:
    """Links the files of a table into another folder, or copies them where that is not possible."""
    for file in tf.io.gfile.listdir(source):
        if not file.startswith(f"{name}."):
            continue
        path, new = os.path.join(source, file), os.path.join(target, new_name + file[len(name) :])
        try:
            os.link(path, new)
        except OSError:
            tf.io.gfile.copy(path, new)


def _finish(folder: str, files: str) -> None:
    """Moves the data of tables beside the indexes, which TensorFlow has copied to the assets."""
    for name in tf.io.gfile.listdir(files):
        table, _, kind = name.partition(".")
        if kind.startswith("data-") and tf.io.gfile.exists(os.path.join(folder, "assets", f"{table}.index")):
            tf.io.gfile.rename(os.path.join(files, name), os.path.join(folder, "assets", name))
    tf.io.gfile.rmtree(files)
