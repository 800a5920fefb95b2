"""SavedModels of models with tables, which TensorFlow Serving takes, and small ones with what has changed since.

saved_model.pb, variables/      the model; what is small goes through the client
assets/                         keys and rows of the tables, written by the parameter servers
assets.extra/coordinator.json   what `export_delta` needs to know of them
"""

import contextlib
import dataclasses
import json
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from coordinator.embeddings.exported_rows import DTYPES, Base, Written, write_rows
from coordinator.embeddings.served_table import ServedTable
from coordinator.embeddings.table import Table
from coordinator.paths import checkpoint_path
from coordinator.ps_strategy.keras.internals.inputs import structured_inputs
from coordinator.ps_strategy.keras.internals.parts import variable_of
from coordinator.ps_strategy.keras.internals.table_updates import is_table
from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced

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
    _save(model, function, served, folder)
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


def _save(model: keras.Model, function: Any, served: dict[Table, ServedTable], folder: str) -> None:
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
