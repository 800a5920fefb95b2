"""Conversion of Parquet and CSV files to TFRecord files, which standard TensorFlow servers can read."""

import contextlib
import importlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.errors import LaunchError

# The number of rows of a Parquet file that are converted at a time.
_ROWS = 1024
_CONVERTED = bool | int | float | str | bytes


def convert(paths: Sequence[str], folder: str) -> str:
    """Writes a TFRecord file of examples for each Parquet or CSV file.

    Each column becomes a feature. Integers and booleans are stored as int64, other numbers as float32, str and bytes
    values as strings. A list of such values becomes a feature with several values.

    Args:
      paths: the paths of local `.parquet` or `.csv` files. The first line of a CSV file must name the columns.
      folder: the folder for the TFRecord files, which is created if it does not exist.

    Returns:
      The source code of the call of `coordinator.data.records` that reads the TFRecord files.

    Raises:
      LaunchError: pyarrow is not installed, or a file cannot be converted. The message says why.
    """
    outputs = [os.path.join(folder, os.path.splitext(os.path.basename(path))[0] + ".tfrecord") for path in paths]
    columns = _Columns()
    # The files are renamed after all files are converted, so that a killed program leaves only drafts behind.
    drafts = [f"{output}.{secrets.token_hex(8)}.tmp" for output in outputs]
    written: list[str] = []
    try:
        for path, output in zip(paths, outputs, strict=True):
            with _errors_told(path):
                _check(path, output, outputs)
        with _errors_told(folder, "written to"):
            tf.io.gfile.makedirs(folder)
        for path, draft in zip(paths, drafts, strict=True):
            with _errors_told(path):
                write(_tables(path), draft, columns, path)
            written.append(draft)
        if not columns.known:
            raise LaunchError(f"There are no rows in {', '.join(map(repr, paths))}.")
        for draft, output in zip(drafts, outputs, strict=True):
            with _errors_told(output, "written"):
                tf.io.gfile.rename(draft, output)
            written[written.index(draft)] = output
    except BaseException:
        for file in written:
            _remove(file)
        raise
    return f"coordinator.data.records({outputs!r}, features={{\n{columns}}})"


def _check(path: str, output: str, outputs: Sequence[str]) -> None:
    if not tf.io.gfile.exists(path):
        raise LaunchError(f"{path!r} does not exist.")
    if tf.io.gfile.isdir(path):
        raise LaunchError(f"{path!r} is a folder.")
    if tf.io.gfile.exists(output) or outputs.count(output) > 1:
        raise LaunchError(f"{output!r} would be overwritten. Give another folder, or remove or rename the file.")


@contextlib.contextmanager
def _errors_told(path: str, done: str = "converted") -> Iterator[None]:
    """Replaces an error of a file, the system or pyarrow by a LaunchError with a message of one sentence."""
    try:
        yield
    except LaunchError:
        raise
    except Exception as error:
        lines = str(getattr(error, "message", error)).splitlines() or [type(error).__name__]
        raise LaunchError(f"{path!r} cannot be {done}: {lines[0].rstrip('.')}.") from error


def _remove(path: str) -> None:
    with contextlib.suppress(tf.errors.OpError):
        tf.io.gfile.remove(path)


class _Columns:
    """The columns of all files. `known` maps a column's name to its type and to the numbers of values in its rows."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[str, set[int | None]]] = {}

    def feature(self, name: str, value: Any) -> tf.train.Feature:
        """Returns a value as a feature. Raises LaunchError for a missing value, or one of another type than before."""
        is_list = isinstance(value, list | tuple)
        values = list(value) if is_list else [value]
        kinds = {
            "int64" if isinstance(value, bool | int) else "float32" if isinstance(value, float) else "string"
            for value in values
            if isinstance(value, _CONVERTED)
        }
        if len(kinds) > 1 or not all(isinstance(value, _CONVERTED) for value in values):
            types = ", ".join(sorted({type(value).__name__ for value in values}))
            hint = "Fill missing values in first." if None in values else "Convert them to numbers or strings first."
            raise LaunchError(f"The column {name!r} has values of the type {types}, which are not converted. {hint}")
        kind = kinds.pop() if kinds else ""
        former, lengths = self.known.get(name, ("", set()))
        if kind and former not in (kind, ""):
            raise LaunchError(f"The column {name!r} has values of type {former} and of type {kind}.")
        lengths.add(len(values) if is_list else None)
        self.known[name] = kind or former, lengths
        if not values:
            return tf.train.Feature()
        if kind == "int64":
            if large := [number for number in values if not -(2**63) <= number < 2**63]:
                raise LaunchError(f"The column {name!r} has the value {large[0]}, which is too large for int64.")
            return tf.train.Feature(int64_list=tf.train.Int64List(value=map(int, values)))
        if kind == "string":
            texts = [text.encode() if isinstance(text, str) else text for text in values]
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=texts))
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))

    def check(self, names: Iterable[str], path: str) -> None:
        """Raises LaunchError if the columns of a file differ from the columns of the files before it."""
        if self.known and set(names) != set(self.known):
            differing = ", ".join(sorted(set(names) ^ set(self.known)))
            raise LaunchError(f"{path!r} has other columns than the files before it; these differ: {differing}.")

    def __str__(self) -> str:
        lines = []
        for name, (kind, lengths) in sorted(self.known.items()):
            if len(lengths) > 1:
                form = f"tf.io.RaggedFeature(tf.{kind or 'float32'})"
            else:
                [length] = lengths
                form = f"tf.io.FixedLenFeature({[] if length is None else [length]}, tf.{kind or 'float32'})"
            lines.append(f"    {name!r}: {form},\n")
        return "".join(lines)


def write(
    tables: Iterator[Mapping[str, Sequence[Any]]], output: str, columns: _Columns | None = None, source: str = ""
) -> _Columns:
    """Writes a TFRecord file of the rows of `tables`. Each table maps column names to the values of some rows.

    `columns` has the columns of other files. Error messages call the tables `source`. An error removes the file.
    """
    columns = _Columns() if columns is None else columns
    try:
        with tf.io.TFRecordWriter(output) as writer:
            for table in tables:
                columns.check(table, source or output)
                for row in zip(*table.values(), strict=True):
                    features = {name: columns.feature(name, value) for name, value in zip(table, row, strict=True)}
                    example = tf.train.Example(features=tf.train.Features(feature=features))
                    writer.write(example.SerializeToString())
    except BaseException:
        _remove(output)
        raise
    return columns


def _tables(path: str) -> Iterator[dict[str, list[Any]]]:
    # pyarrow is imported by name, because only users who convert files have it installed.
    try:
        if path.endswith(".parquet"):
            file = importlib.import_module("pyarrow.parquet").ParquetFile(path)
            names, batches = file.schema_arrow.names, file.iter_batches(_ROWS)
        elif path.endswith(".csv"):
            batches = importlib.import_module("pyarrow.csv").open_csv(path)
            names = batches.schema.names
        else:
            raise LaunchError(f"{path!r} is neither .parquet nor .csv.")
    except ImportError as error:
        raise LaunchError("Parquet and CSV files are read by pyarrow: pip install 'coordinator-tf[data]'.") from error
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise LaunchError(f"{path!r} has more than one column {', '.join(map(repr, repeated))}.")
    for batch in batches:
        yield batch.to_pydict()
