"""Sources of examples in files. The workers find examples by byte positions, and read parts of the files.

Workers are standard TensorFlow servers, which read by TensorFlow operations. The operations support all file systems of
`tf.io.gfile`. A range has consecutive examples, so a worker reads one part of a file, or of a few files.

Files in the worker's local file system are mapped into memory. A part is then copied without a system call, at a tenth
of the cost of opening the file again. Files in other file systems (`gs://...`) are opened for each part.
"""

import contextlib
import hashlib
import itertools
import logging
import os
import re
import struct
import uuid
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.addresses import is_url, path_text
from coordinator.data.source import IN_ORDER, ArraysSource, Source, arrays, digest_of

_logger = logging.getLogger("coordinator")

# The size of a worker's read buffer, of a block that the client reads, and of a file's part in the digest, in bytes.
_BUFFER, _BLOCK, _SAMPLE = 2**18, 2**24, 2**12
# The maximum number of bytes that one operation copies. TensorFlow ends the process for a string of 2 GiB.
_MOST_COPIED = 2**31 - 2**12
# The path of an index file next to a data file, or of a draft of an index file.
_INDEX = re.compile(r"(.+)\.(records|lines(-\d+)?)-index\.npy(\.\w+\.tmp)?")
_CHECKSUM_BYTES = 16
# A record has a header (8 bytes of length, 4 bytes of checksum), the data, and another checksum of 4 bytes.
_HEADER, _FRAME = 12, 16
# The shape of a vector of any length, for operations on tensor lists.
_VECTOR = [-1]
# The element types of datasets of strings and of string vectors.
_STRINGS = {"output_types": [tf.string], "output_shapes": [[]]}
_STRING_VECTOR = {"output_types": [tf.string], "output_shapes": [[None]]}


def lines(paths: Any, parse: Callable[[Any], Any] | None = None, skip: int = 0) -> Source:
    """Returns a source of the lines of text files, which the workers read.

    For CSV, use `lines(paths, lambda lines: tf.io.decode_csv(lines, defaults), skip=1)`. If possible, an index of each
    file is written next to the file, and read the next time.

    Args:
      paths: the paths of uncompressed files, which all workers must be able to read.
      parse: a function that takes a vector of lines without their line ends, and returns a structure of tensors. If
        None, `read` returns the vector.
      skip: the number of lines, such as headers, that are skipped at the beginning of each file.

    Raises:
      TypeError: `paths` is neither a path nor a sequence of paths.
      ValueError: there are no lines.
      FileNotFoundError: a file does not exist.
    """
    return _Lines(paths, parse, skip)


def records(paths: Any, features: Mapping[str, Any] | Callable[[Any], Any] | None = None) -> Source:
    """Returns a source of the records of TFRecord files, which the workers read.

    If possible, an index of each file is written next to the file, and read the next time. The checksums of the records
    are not verified.

    Args:
      paths: the paths of uncompressed files, which all workers must be able to read.
      features: the `features` of `tf.io.parse_example`, or a function that takes a vector of serialized records and
        returns a structure of tensors. If None, `read` returns the vector.

    Raises:
      TypeError: `paths` is neither a path nor a sequence of paths.
      ValueError: a file is not a TFRecord file, or is compressed.
      FileNotFoundError: a file does not exist.
    """
    if features is None or callable(features):
        return _Records(paths, "records", features)
    return _Records(paths, "records", lambda serialized: tf.io.parse_example(serialized, features))


def rows(paths: Any, dtype: Any = None, shape: Sequence[int] | None = None) -> Source:
    """Returns a source of the rows of files, which the workers read.

    Args:
      paths: the paths of `.npy` files, or of files that contain only rows of `dtype` and `shape`. All workers must be
        able to read the files. For a NumPy array, `rows` returns the source of `arrays`.
      dtype: the dtype of the little-endian numbers. For `.npy` files, which contain their dtype, leave `dtype` out.
      shape: the shape of a row. For `.npy` files, leave `shape` out.

    Raises:
      TypeError, ValueError: a file is of another kind, or the rows of the files differ in dtype or shape.
      FileNotFoundError: a file does not exist.
    """
    return arrays(paths) if isinstance(paths, np.ndarray) else _Rows(_checked_paths(paths, "rows"), dtype, shape)


def written_ns(path: str) -> int:
    """Returns the modification time of a file in Unix nanoseconds, by the clock of the file system, or 0 if unknown.

    Raises FileNotFoundError or tf.errors.NotFoundError if there is no such file.
    """
    # For local files, TensorFlow gives only whole seconds.
    return int(tf.io.gfile.stat(path).mtime_nsec) if is_url(path) else os.stat(path).st_mtime_ns


def _file_size(path: str) -> int:
    return int(tf.io.gfile.stat(path).length)


def _checked_paths(paths: Any, name: str) -> list[str]:
    """Returns the paths of the data files among `paths`. A pattern may also match the paths of index files.

    Raises the errors of the function `name` for paths, and ValueError for a URL that `pathlib` has changed.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    if not isinstance(paths, Sequence) or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise TypeError(f"{name} takes the path of a file, or a list of paths, got {paths!r}.")
    if not paths:
        raise ValueError(f"{name} was given no path.")
    texts = [path_text(path) for path in paths]
    data = [path for path in texts if not ((index := _INDEX.fullmatch(path)) and index[1] in texts)]
    for path in data:
        if not tf.io.gfile.exists(path):
            raise FileNotFoundError(f"{name} was given {path!r}, which does not exist, or cannot be read from here.")
    return data


class _Files(ArraysSource):
    """A source of consecutive examples in files. `name` is the name of the function that creates the source.

    Each worker keeps the arrays `index` in its memory to find the examples. `parse` takes a tensor of examples and
    returns a structure of tensors. If `parse` is None, `read` returns the tensor.
    """

    mixes_all = False

    def __init__(
        self,
        name: str,
        paths: Sequence[str],
        counts: Sequence[int],
        index: Sequence[np.ndarray[Any, Any]] = (),
        parse: Callable[[Any], Any] | None = None,
    ) -> None:
        self.size = sum(counts)
        if not self.size:
            raise ValueError(f"{name} was given files without examples: {', '.join(paths[:3])}.")
        self.digest = _digest_of_files(paths, counts)
        self._name = name
        self._parse = parse
        # Empty files are left out, because no bytes can be read from them.
        self._paths = [path for path, count in zip(paths, counts, strict=True) if count]
        self._sizes = [_file_size(path) for path in self._paths]
        # The number of the first example of each file, and then the number of all examples.
        self._firsts = [0, *itertools.accumulate(count for count in counts if count)]
        # TensorFlow would read whole files of other file systems instead of mapping them.
        self._are_mapped = not any(is_url(path) for path in self._paths)
        # A worker maps the files when it first reads.
        super().__init__([*index, self._maps] if self._are_mapped else index)

    def read_range(self, positions: Any) -> Any:
        examples = self._examples_of(positions)
        return examples if self._parse is None else self._parse(examples)

    # AutoGraph converts only `parse`.
    @tf.autograph.experimental.do_not_convert
    def _examples_of(self, positions: Any) -> Any:
        return as_one_operation(self._shuffled_examples, tf.cast(positions, tf.int64), *self._arrays())

    def _shuffled_examples(self, positions: Any, *on_worker: Any) -> Any:
        _, start, count, number, seed = tf.unstack(positions, num=5)
        # Examples are shuffled before they are parsed, because a string is moved without a copy.
        examples = self._examples(start, count, *on_worker)
        # For few examples, a permutation by `tf.random.experimental.index_shuffle` takes hundreds of times as long.
        noise = tf.random.stateless_uniform([count], tf.stack([seed, number]), None, None, tf.int32, alg="philox")
        _, order = tf.math.top_k(noise, tf.cast(count, tf.int32))
        return tf.gather(examples, tf.where(seed == IN_ORDER, tf.range(tf.cast(count, tf.int32)), order))

    @abstractmethod
    def _examples(self, start: Any, count: Any, *on_worker: Any) -> Any:
        """Reads `count` examples from number `start`, int64 scalars. `on_worker` has the index and the mapped files."""

    def _files_of(self, numbers: Any) -> Any:
        """Returns the index of each example's file. `numbers` is an int64 vector of example numbers."""
        if len(self._paths) == 1:
            return tf.zeros_like(numbers)
        indices = tf.raw_ops.UpperBound(sorted_inputs=[self._firsts[1:]], values=[numbers], out_type=tf.int64)
        return tf.squeeze(indices, 0)

    def _bytes(self, maps: Sequence[Any], start: Any, count: Any, positions_of: Callable[[Any, Any], Any]) -> Any:
        """Returns the bytes of `count` examples from number `start` (int64 scalars), across files, as a string scalar.

        `maps` has the result of `_maps` on this worker, or is empty if the files are not mapped. `positions_of` takes
        the index of a file and example numbers, counted over all files, up to the file's last + 1. `positions_of`
        returns the byte positions in the file at which these examples begin.
        """

        def read_part(file: Any, begin: Any, end: Any) -> Any:
            begin, end = tf.unstack(positions_of(file, tf.stack([begin, end])))
            if maps:
                return _copied_bytes(maps[0], file, begin, end)
            return _read_bytes(tf.constant(self._paths)[file], begin, end, tf.constant(self._sizes, tf.int64)[file])

        end = start + count
        if len(self._paths) == 1:
            return read_part(tf.constant(0, tf.int64), start, end)
        first, last = tf.unstack(self._files_of(tf.stack([start, end - 1])))
        firsts = tf.constant(self._firsts, tf.int64)

        def read_parts() -> Any:
            parts = tf.map_fn(
                lambda file: read_part(file, tf.maximum(start, firsts[file]), tf.minimum(end, firsts[file + 1])),
                tf.range(first, last + 1),
                fn_output_signature=tf.string,
            )
            return tf.strings.reduce_join(parts)

        # Most ranges are in one file.
        return tf.cond(first == last, lambda: read_part(first, start, end), lambda: as_one_operation(read_parts))

    def _maps(self) -> Any:
        """Returns a tensor list with the content of each file as a vector of bytes. Files are mapped, not read."""
        maps = tf.raw_ops.EmptyTensorList(element_shape=_VECTOR, max_num_elements=-1, element_dtype=tf.uint8)
        for path, size in zip(self._paths, self._sizes, strict=True):
            try:
                content = tf.raw_ops.ImmutableConst(dtype=tf.uint8, shape=[size], memory_region_name=path)
            except tf.errors.InternalError as error:
                raise ValueError(
                    f"{path!r} has another size here than the {size} bytes that it had when the source was created. "
                    "Files must be the same on all workers, and must not change while they are read."
                ) from error
            maps = tf.raw_ops.TensorListPushBack(input_handle=maps, tensor=content)
        return maps

    def __repr__(self) -> str:
        return f"<coordinator.data.{self._name}: {self.size} examples in {len(self._paths)} files>"


def _digest_of_files(paths: Sequence[str], counts: Sequence[int]) -> str:
    """Returns a digest of the name, size and number of examples of each file, and of the beginnings of three files."""
    named = zip(paths, counts, strict=True)
    parts = [f"{os.path.basename(path)} {_file_size(path)} {count}".encode() for path, count in named]
    for path in dict.fromkeys((paths[0], paths[len(paths) // 2], paths[-1])):
        with tf.io.gfile.GFile(path, "rb") as file:
            parts.append(file.read(_SAMPLE))
    return digest_of(parts)


def as_one_operation(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function that only reads, as one operation of the graph that is being traced.

    A graph of many steps then stays small, and is built faster. The call takes some microseconds. Such operations run
    concurrently. Otherwise, operations that open files would wait for each other, because they are stateful. The
    function takes tensors, captures no resource, and returns a tensor. If `args` has variables, their values are read.
    """
    if tf.executing_eagerly():
        return function(*args)
    tensors = [tf.convert_to_tensor(value) for value in args]
    concrete = tf.function(function, autograph=False, experimental_attributes={"_noinline": True})
    concrete = concrete.get_concrete_function(*tensors)
    [output] = concrete.outputs
    [result] = tf.raw_ops.PartitionedCall(args=[*tensors, *concrete.captured_inputs], Tout=[output.dtype], f=concrete)
    result.set_shape(output.shape)
    return result


def _copied_bytes(maps: Any, file: Any, begin: Any, end: Any) -> Any:
    index = tf.cast(file, tf.int32)
    content = tf.raw_ops.TensorListGetItem(
        input_handle=maps, index=index, element_shape=_VECTOR, element_dtype=tf.uint8
    )
    message = f"A range has more than {_MOST_COPIED} bytes. Use a smaller batch_size, or fewer batches_per_range."
    with tf.control_dependencies([tf.raw_ops.Assert(condition=end - begin <= _MOST_COPIED, data=[message])]):
        end = tf.identity(end)
    # Only `serialize_tensor` converts a vector of bytes to a string. The bytes are at the end of the string.
    serialized = tf.io.serialize_tensor(content[begin:end])
    count = tf.cast(end - begin, tf.int32)
    return tf.strings.substr(serialized, tf.strings.length(serialized) - count, count)


def _read_bytes(path: Any, begin: Any, end: Any, size: Any) -> Any:
    part = tf.raw_ops.FixedLengthRecordDatasetV2(
        filenames=path,
        header_bytes=begin,
        record_bytes=end - begin,
        footer_bytes=size - end,
        buffer_size=tf.constant(_BUFFER, tf.int64),
        compression_type="",
    )
    return tf.raw_ops.DatasetToSingleElement(dataset=part, **_STRINGS)[0]


class _FramedFiles(_Files):
    """A source of examples of different sizes. `name` is also in the index's name: "records", "lines" or "lines-N".

    The index has 8 bytes for each example. The index is kept in an index file next to each data file, and in the memory
    of each worker. If an index file is damaged or the data file has changed, the index is made again.
    """

    # Set after an index file could not be written, so that the write is not tried and logged for each data file.
    _is_index_unkept = False

    def __init__(self, paths: Any, name: str, parse: Callable[[Any], Any] | None) -> None:
        checked = _checked_paths(paths, name)
        # For each file, the start of each example and the end of the last example.
        starts = [self._index(path, name) for path in checked]
        whole = np.concatenate([each for each in starts if len(each) > 1] or starts)
        super().__init__(name, checked, [len(each) - 1 for each in starts], [whole], parse)

    @abstractmethod
    def _starts(self, path: str) -> np.ndarray[Any, Any]:
        """Returns the start of each example of a file and the end of the last example, in bytes."""

    @abstractmethod
    def _unframed(self, data: Any, begins: Any, sizes: Any) -> Any:
        """Returns a string vector of the examples in `data`. `begins` and `sizes` are int64 vectors."""

    def _examples(self, start: Any, count: Any, *on_worker: Any) -> Any:
        starts, *maps = on_worker
        numbers = start + tf.range(count)
        # Each file has one more start than it has examples.
        places = numbers + self._files_of(numbers)
        sizes = tf.gather(starts, places + 1) - tf.gather(starts, places)
        data = self._bytes(maps, start, count, lambda file, numbers: tf.gather(starts, numbers + file))
        return self._unframed(data, tf.cumsum(sizes, exclusive=True), sizes)

    def _index(self, path: str, name: str) -> np.ndarray[Any, Any]:
        """Returns the starts from the index file of a data file, or finds the starts and writes an index file."""
        written = written_ns(path)
        state = f"{name} {_file_size(path)} {written}"
        # An index file needs the modification time, without which a change that keeps the size would not be noticed.
        beside = f"{path}.{name}-index.npy" if written else None
        starts = None if beside is None else _kept_index(beside, state)
        if starts is None:
            starts = np.asarray(self._starts(path), np.int64)
            if beside is not None and not self._is_index_unkept:
                self._is_index_unkept = not _keep_index(beside, state, starts)
        return starts


def _kept_index(beside: str, state: str) -> np.ndarray[Any, Any] | None:
    """Returns the starts in an index file, or None if the index is damaged or of another state of the data file."""
    try:
        with tf.io.gfile.GFile(beside, "rb") as file:
            kept = np.load(file, allow_pickle=False)
    except Exception:  # noqa: BLE001 - NumPy raises anything for a damaged file
        return None
    if not isinstance(kept, np.ndarray) or kept.ndim != 1 or kept.dtype != np.int64:
        return None
    starts = kept[_CHECKSUM_BYTES // 8 :]
    return starts if np.array_equal(kept, _with_checksum(state, starts)) else None


def _keep_index(beside: str, state: str, starts: np.ndarray[Any, Any]) -> bool:
    """Writes an index file atomically. Returns whether this succeeded, and logs a failure."""
    # A process id would not be a unique name, because it is 1 in every container.
    draft = f"{beside}.{uuid.uuid4().hex}.tmp"
    try:
        with tf.io.gfile.GFile(draft, "wb") as file:
            np.save(file, _with_checksum(state, starts))
        tf.io.gfile.rename(draft, beside, overwrite=True)
    except (OSError, tf.errors.OpError) as error:
        _logger.info("Indexes such as %s are not kept for the next time: %s", beside, error)
        with contextlib.suppress(OSError, tf.errors.OpError):
            tf.io.gfile.remove(draft)
        return False
    return True


def _with_checksum(state: str, starts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the content of an index file: a checksum of the data file's state and the starts, then the starts."""
    checksum = hashlib.blake2b(state.encode() + starts.tobytes(), digest_size=_CHECKSUM_BYTES).digest()
    return np.concatenate([np.frombuffer(checksum, np.int64), starts])


class _Lines(_FramedFiles):
    def __init__(self, paths: Any, parse: Callable[[Any], Any] | None, skip: int) -> None:
        self._skip = skip
        super().__init__(paths, f"lines-{skip}" if skip else "lines", parse)

    def _starts(self, path: str) -> np.ndarray[Any, Any]:
        begin, ends = 0, [np.zeros(1, np.int64)]
        with tf.io.gfile.GFile(path, "rb") as file:
            while block := file.read(_BLOCK):
                ends.append(begin + 1 + np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")))
                begin += len(block)
        starts = np.concatenate(ends)
        if starts[-1] != begin:
            starts = np.append(starts, begin)
        return starts[min(self._skip, len(starts) - 1) :]

    def _unframed(self, data: Any, begins: Any, sizes: Any) -> Any:
        return tf.strings.regex_replace(tf.strings.substr(data, begins, sizes), "\r?\n$", "")


class _Records(_FramedFiles):
    def _starts(self, path: str) -> np.ndarray[Any, Any]:
        size, starts = _file_size(path), [0]
        with tf.io.gfile.GFile(path, "rb") as file:
            block, begin = b"", 0
            while (start := starts[-1]) < size:
                if start + _HEADER > begin + len(block):
                    file.seek(start)
                    block, begin = file.read(_BLOCK), start
                if len(block) - (start - begin) < _HEADER:
                    break
                (length,) = struct.unpack_from("<Q", block, start - begin)
                if start + length + _FRAME > size:
                    break
                starts.append(start + length + _FRAME)
        if starts[-1] != size:
            raise ValueError(
                f"{path!r} is no TFRecord file, is compressed, or was cut off: what begins at byte {starts[-1]} is no "
                "record."
            )
        return np.array(starts)

    def _unframed(self, data: Any, begins: Any, sizes: Any) -> Any:
        return tf.strings.substr(data, begins + _HEADER, sizes - _FRAME)

    def _examples(self, start: Any, count: Any, *on_worker: Any) -> Any:
        if self._are_mapped:
            return super()._examples(start, count, *on_worker)
        [starts] = on_worker
        ends = tf.stack([start, start + count - 1])
        first, last = tf.unstack(self._files_of(ends))
        begin = tf.gather(starts, start + first)
        end = tf.gather(starts, start + count + last)
        dataset = tf.raw_ops.TFRecordDatasetV2(
            filenames=tf.constant(self._paths)[first : last + 1],
            compression_type="",
            # If the range is in one file, the buffer is not larger than the range.
            buffer_size=tf.where(first == last, tf.clip_by_value(end - begin, 1, _BUFFER), _BUFFER),
            # Without the offset `begin`, TensorFlow would read the first file from its beginning.
            byte_offsets=tf.concat([[begin], tf.zeros([last - first], tf.int64)], 0),
        )
        # The dataset is read as one element. TensorFlow would optimize an iterated dataset, which fails with offsets.
        dataset = tf.raw_ops.TakeDataset(input_dataset=dataset, count=count, **_STRINGS)
        dataset = tf.raw_ops.BatchDatasetV2(
            input_dataset=dataset, batch_size=count, drop_remainder=True, **_STRING_VECTOR
        )
        return tf.raw_ops.DatasetToSingleElement(dataset=dataset, **_STRING_VECTOR)[0]


# The size of a file's header in bytes, the dtype of the rows, and the shape of a row.
_Header = tuple[int, np.dtype[Any], tuple[int, ...]]


class _Rows(_Files):
    def __init__(self, paths: Sequence[str], dtype: Any, shape: Sequence[int] | None) -> None:
        if (dtype is None) != (shape is None):
            raise ValueError("rows takes dtype and shape together, or neither for .npy files.")
        headers: list[_Header] = [
            _npy_header(path) if shape is None else (0, np.dtype(dtype), tuple(shape)) for path in paths
        ]
        _, self._dtype, self._shape = headers[0]
        for path, (_, other_dtype, other_shape) in zip(paths, headers, strict=True):
            if (other_dtype, other_shape) != (self._dtype, self._shape):
                raise ValueError(
                    f"The rows of {path!r} are of {other_dtype} {other_shape}, those of {paths[0]!r} of {self._dtype} "
                    f"{self._shape}: use a source for each kind."
                )
        if self._dtype.hasobject or self._dtype.byteorder == ">" or self._dtype.kind not in "biufc":
            raise ValueError(f"rows reads little-endian numbers, got {self._dtype}.")
        self._width = int(np.prod(self._shape, dtype=np.int64)) * self._dtype.itemsize
        self._headers = [header for header, _, _ in headers]
        super().__init__("rows", paths, [self._count(*pair) for pair in zip(paths, self._headers, strict=True)])

    def _count(self, path: str, header: int) -> int:
        size = _file_size(path) - header
        count, remainder = divmod(size, self._width)
        if remainder or not count:
            raise ValueError(
                f"{path!r} has {size} bytes of rows, which is no positive multiple of {self._width}, the size of a "
                "row: check dtype and shape."
            )
        return count

    def _examples(self, start: Any, count: Any, *on_worker: Any) -> Any:
        headers, firsts = tf.constant(self._headers, tf.int64), tf.constant(self._firsts, tf.int64)
        data = self._bytes(
            on_worker, start, count, lambda file, row: headers[file] + (row - firsts[file]) * self._width
        )
        if self._dtype == np.bool_:
            numbers = tf.cast(tf.io.decode_raw(data, tf.uint8), tf.bool)
        else:
            numbers = tf.io.decode_raw(data, tf.as_dtype(self._dtype))
        return tf.reshape(numbers, [-1, *self._shape])


def _npy_header(path: str) -> _Header:
    with tf.io.gfile.GFile(path, "rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read(file)
        except ValueError as error:
            text = f"{path!r} is no .npy file ({error}): give dtype and shape if it has rows alone."
            raise ValueError(text) from None
        header = file.tell()
    if is_fortran or not shape:
        raise ValueError(f"{path!r} has no rows one behind the other: save np.ascontiguousarray(array).")
    return header, dtype, shape[1:]
