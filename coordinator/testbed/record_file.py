"""Images and labels as a file of records, which the workers of this machine read: no graph has to hold them."""

import pathlib
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.testbed.image_data import ImageData


class RecordFile:
    """Each record is a label, then an image, byte by byte.

    Args:
      data: what is written.
      path: where.
    """

    def __init__(self, data: ImageData, path: pathlib.Path) -> None:
        self._shape, self._highest, self._path = data.shape, data.highest, path
        self._count = len(data.images)
        np.concatenate([data.labels[:, None], data.images.reshape(self._count, -1)], axis=1).tofile(path)

    def minibatches(self, batch_size: int, worker: int, workers: int, seed: int) -> tf.data.Dataset:
        """A worker's part of the images, in another order each time through, without end.

        Returns:
          Pairs of images, float32 [batch_size, height, width, channels] from 0 to 1, and labels, int32 [batch_size].
        """

        def decoded(records: Any) -> Any:
            values = tf.reshape(tf.io.decode_raw(records, tf.uint8), [batch_size, -1])
            images = tf.reshape(tf.cast(values[:, 1:], tf.float32) / self._highest, [batch_size, *self._shape])
            return images, tf.cast(values[:, 0], tf.int32)

        records = tf.data.FixedLengthRecordDataset(str(self._path), 1 + int(np.prod(self._shape)))
        part = records.shard(workers, worker).cache().shuffle(self._count, seed=seed)
        return part.repeat().batch(batch_size, drop_remainder=True).map(decoded).prefetch(2)
