"""Files whose examples are found by byte positions, and the reading of parts of them on the workers.

Workers are standard servers: what they read is described by operations of TensorFlow, which know all file systems that
TensorFlow has (`tf.io.gfile`). A range has consecutive examples, so that it is one part of a file, or of few.

Files of the worker's own file system are mapped into its memory: a part of one is copied without a system call, and
costs a tenth of opening the file again, wherever it is. Files of others (`gs://...`) are opened for each part.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.data.source import IN_ORDER, digest_of
from coordinator.data.worker_arrays import WorkerArrays
from coordinator.paths import is_url, path_text

# In bytes: what a worker reads at a time, and what the digest has of a file.
_BUFFER = 2**18
_SAMPLE = 2**12
# What can be copied of a mapped file at once: TensorFlow ends the process if it is asked for a string of 2 GiB.
_MOST_COPIED = 2**31 - 2**12
# An index that is kept beside a file, or is being written, for all kinds of files that have one.
_INDEX = re.compile(r"(.+)\.(records|lines(-\d+)?)-index\.npy(\.\w+\.tmp)?")
# The shape of a vector of any length, as operations on lists take it.
_VECTOR = [-1]


def checked_paths(paths: Any, name: str) -> list[str]:
    """Returns the paths of files, without the indexes that an earlier run kept beside them: a pattern may match both.

    Args:
      paths: one, or several.
      name: of the function that was given them, for messages.

    Raises:
      TypeError: something else.
      ValueError: there is none, or one is what `pathlib` makes of a URL.
      FileNotFoundError: a file does not exist.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    if not isinstance(paths, Sequence) or not all(isinstance(each, str | os.PathLike) for each in paths):
        raise TypeError(f"{name} takes the path of a file, or a list of paths, got {paths!r}.")
    if not paths:
        raise ValueError(f"{name} was given no path.")
    given = [path_text(each) for each in paths]
    found = [path for path in given if not ((index := _INDEX.fullmatch(path)) and index[1] in given)]
    for path in found:
        if not tf.io.gfile.exists(path):
            raise FileNotFoundError(f"{name} was given {path!r}, which does not exist, or cannot be read from here.")
    return found


def index_path(path: str, name: str) -> str:
    """Returns where the index of a file is kept.

    Args:
      path: of the file.
      name: of what it has: "records", or "lines" or "lines-N".
    """
    return f"{path}.{name}-index.npy"


def file_size(path: str) -> int:
    """Returns the size of a file in bytes."""
    return int(tf.io.gfile.stat(path).length)


def written_ns(path: str) -> int:
    """Returns when a file was written, in Unix nanoseconds of its file system; 0 if that does not know.

    Raises:
      FileNotFoundError, tf.errors.NotFoundError: there is no such file.
    """
    # TensorFlow gives whole seconds for local files.
    return int(tf.io.gfile.stat(path).mtime_nsec) if is_url(path) else os.stat(path).st_mtime_ns


def digest_of_files(paths: Sequence[str], counts: Sequence[int]) -> str:
    """Returns a digest of the files' names, sizes, numbers of examples, and of the content of some of them."""

    def parts() -> Iterator[bytes]:
        for path, count in zip(paths, counts, strict=True):
            yield f"{os.path.basename(path)} {file_size(path)} {count}".encode()
        for path in dict.fromkeys((paths[0], paths[len(paths) // 2], paths[-1])):
            with tf.io.gfile.GFile(path, "rb") as file:
                yield file.read(_SAMPLE)

    return digest_of(parts())


class FileParts:
    """The parts of files that ranges of examples take, as operations.

    Args:
      paths: of the files.
      counts: the number of examples of each, at least 1.

    Attributes:
      are_mapped: whether the files are mapped into the memory of the workers.
    """

    def __init__(self, paths: Sequence[str], counts: Sequence[int]) -> None:
        self._paths = list(paths)
        self._sizes = [file_size(path) for path in paths]
        # Other file systems would read the whole file instead.
        self.are_mapped = not any(is_url(path) for path in paths)
        self._on_workers = WorkerArrays([self._maps] if self.are_mapped else [])
        # The number of the first example of each file, and that after the last of all.
        self._firsts = [0, *itertools.accumulate(counts)]

    def prepare(self, strategy: Any) -> None:
        """Has each worker map the files, when it first reads."""
        self._on_workers.prepare(strategy)

    def files_of(self, numbers: Any) -> Any:
        """Returns the index of the file of each example, of int64 vectors of numbers of examples."""
        if len(self._paths) == 1:
            return tf.zeros_like(numbers)
        found = tf.raw_ops.UpperBound(sorted_inputs=[self._firsts[1:]], values=[numbers], out_type=tf.int64)
        return tf.squeeze(found, 0)

    def maps(self) -> Sequence[Any]:
        """Returns what `read` takes, for the function that is being traced."""
        return self._on_workers.read()

    def read(self, maps: Sequence[Any], first: Any, last: Any, positions_of: Any) -> Any:
        """Reads the bytes of some examples, across files.

        Args:
          maps: the files in the worker's memory; empty if they are not mapped.
          first: the number of the first example, an int64 scalar.
          last: that of the last one.
          positions_of: takes the index of a file, and a vector of numbers of examples in all files, or of that after
            the last of the file; returns where they begin in the file, in bytes.

        Returns:
          A string scalar.
        """

        def read_part(file: Any, begin: Any, end: Any) -> Any:
            begin, end = tf.unstack(positions_of(file, tf.stack([begin, end])))
            if maps:
                return _copied_bytes(maps[0], file, begin, end)
            return _read_bytes(tf.constant(self._paths)[file], begin, end, tf.constant(self._sizes, tf.int64)[file])

        if len(self._paths) == 1:
            return read_part(tf.constant(0, tf.int64), first, last + 1)
        begin, end = tf.unstack(self.files_of(tf.stack([first, last])))
        firsts = tf.constant(self._firsts, tf.int64)

        def read_parts() -> Any:
            parts = tf.map_fn(
                lambda file: read_part(file, tf.maximum(first, firsts[file]), tf.minimum(last + 1, firsts[file + 1])),
                tf.range(begin, end + 1),
                fn_output_signature=tf.string,
            )
            return tf.strings.reduce_join(parts)

        # Most ranges are in one file.
        return tf.cond(begin == end, lambda: read_part(begin, first, last + 1), lambda: as_one_operation(read_parts))

    def _maps(self) -> Any:
        """Returns the content of all files, a list of vectors of bytes, of which nothing is read yet.

        Raises:
          ValueError: a file has another size.
        """
        found = tf.raw_ops.EmptyTensorList(element_shape=_VECTOR, max_num_elements=-1, element_dtype=tf.uint8)
        for path, size in zip(self._paths, self._sizes, strict=True):
            try:
                content = tf.raw_ops.ImmutableConst(dtype=tf.uint8, shape=[size], memory_region_name=path)
            except tf.errors.InternalError as error:
                raise ValueError(
                    f"{path!r} has another size here than the {size} bytes that it had when the source was created. "
                    "Files must be the same on all workers, and must not change while they are read."
                ) from error
            found = tf.raw_ops.TensorListPushBack(input_handle=found, tensor=content)
        return found


def as_one_operation(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function that only reads, so that it is one operation of the graph that is traced.

    A graph of many steps stays small: it takes as many times less to make as the function has operations. The call
    itself takes some microseconds. And such operations run at the same time; those that open files would otherwise wait
    for each other, since they count as operations with a state.

    Args:
      function: takes tensors, captures none that is a resource, and returns a tensor.
      *args: the tensors, or variables that are read.
    """
    if tf.executing_eagerly():
        return function(*args)
    given = [tf.convert_to_tensor(each) for each in args]
    concrete = tf.function(function, autograph=False, experimental_attributes={"_noinline": True})
    concrete = concrete.get_concrete_function(*given)
    [output] = concrete.outputs
    [found] = tf.raw_ops.PartitionedCall(args=[*given, *concrete.captured_inputs], Tout=[output.dtype], f=concrete)
    found.set_shape(output.shape)
    return found


def shuffled_rows(rows: Any, positions: Any) -> Any:
    """Returns the examples of a range in another order, if the epoch is shuffled.

    Args:
      rows: a structure of tensors with the examples along the first axis.
      positions: see `Source.read`.
    """
    _, _, count, number, seed = tf.unstack(tf.cast(positions, tf.int64), num=5)
    # Of few examples, a permutation by `shuffled` takes hundreds of times as long.
    noise = tf.random.stateless_uniform([count], tf.stack([seed, number]), None, None, tf.int32, alg="philox")
    _, order = tf.math.top_k(noise, tf.cast(count, tf.int32))
    order = tf.where(seed == IN_ORDER, tf.range(tf.cast(count, tf.int32)), order)
    return tf.nest.map_structure(lambda each: tf.gather(each, order), rows)


def concatenated(parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Returns int64 arrays as one."""
    return np.concatenate([np.asarray(part, np.int64) for part in parts])


def _copied_bytes(maps: Any, file: Any, begin: Any, end: Any) -> Any:
    index = tf.cast(file, tf.int32)
    content = tf.raw_ops.TensorListGetItem(
        input_handle=maps, index=index, element_shape=_VECTOR, element_dtype=tf.uint8
    )
    message = f"A range has more than {_MOST_COPIED} bytes. Use a smaller batch_size, or fewer batches_per_range."
    with tf.control_dependencies([tf.raw_ops.Assert(condition=end - begin <= _MOST_COPIED, data=[message])]):
        end = tf.identity(end)
    # The only operation that makes a string of bytes; they are at its end.
    found = tf.io.serialize_tensor(content[begin:end])
    count = tf.cast(end - begin, tf.int32)
    return tf.strings.substr(found, tf.strings.length(found) - count, count)


def _read_bytes(path: Any, begin: Any, end: Any, size: Any) -> Any:
    part = tf.raw_ops.FixedLengthRecordDatasetV2(
        filenames=path,
        header_bytes=begin,
        record_bytes=end - begin,
        footer_bytes=size - end,
        buffer_size=tf.constant(_BUFFER, tf.int64),
        compression_type="",
    )
    return tf.raw_ops.DatasetToSingleElement(dataset=part, output_types=[tf.string], output_shapes=[[]])[0]
