"""TFRecord files."""

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.data.files import file_size
from coordinator.data.framed import FramedSource
from coordinator.data.source import Source

# A record: its length in 8 bytes, a checksum in 4, the data, a checksum in 4.
_HEADER, _FRAME = 12, 16
_BLOCK = 2**24
# What a worker reads at a time at most, in bytes.
_BUFFER = 2**18
_STRINGS = {"output_types": [tf.string], "output_shapes": [[]]}
_STRING_VECTOR = {"output_types": [tf.string], "output_shapes": [[None]]}


def records(paths: Any, features: Mapping[str, Any] | Callable[[Any], Any] | None = None) -> Source:
    """Returns a source of the records of TFRecord files, which the workers read.

    An index of each file is written beside it, if that is possible, and read the next time. The checksums of the
    records are not compared.

    Args:
      paths: of the files, which are not compressed. All workers must be able to read them.
      features: for `tf.io.parse_example`; or a function that takes a vector of serialized records and returns a
        structure of tensors. None returns the vector.

    Raises:
      TypeError: `paths` is neither a path nor a sequence of paths.
      ValueError: a file is no TFRecord file, or is compressed.
      FileNotFoundError: a file does not exist.
    """
    if features is None or callable(features):
        return _Records(paths, "records", features)
    return _Records(paths, "records", lambda serialized: tf.io.parse_example(serialized, features))


class _Records(FramedSource):
    def _starts(self, path: str) -> np.ndarray[Any, Any]:
        size, starts = file_size(path), [0]
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

    def _examples(self, starts: Any, maps: Sequence[Any], start: Any, count: Any) -> Any:
        if self._parts.are_mapped:
            return super()._examples(starts, maps, start, count)
        # Elsewhere a file is read up to the part, unless it is known where its records begin.
        ends = tf.stack([start, start + count - 1])
        first, last = tf.unstack(self._parts.files_of(ends))
        # Each file has one start more than records.
        begin = tf.gather(starts, start + first)
        end = tf.gather(starts, start + count + last)
        found = tf.raw_ops.TFRecordDatasetV2(
            filenames=tf.constant(self._paths)[first : last + 1],
            compression_type="",
            # No more than is wanted, if that is known.
            buffer_size=tf.where(first == last, tf.clip_by_value(end - begin, 1, _BUFFER), _BUFFER),
            byte_offsets=tf.concat([[begin], tf.zeros([last - first], tf.int64)], 0),
        )
        # As one element, which TensorFlow does not optimize: that fails for a dataset with offsets.
        found = tf.raw_ops.TakeDataset(input_dataset=found, count=count, **_STRINGS)
        found = tf.raw_ops.BatchDatasetV2(input_dataset=found, batch_size=count, drop_remainder=True, **_STRING_VECTOR)
        return tf.raw_ops.DatasetToSingleElement(dataset=found, **_STRING_VECTOR)[0]
