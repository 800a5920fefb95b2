"""The images of an experiment in a file, from which each worker reads its part."""

import pathlib
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.testbed.image_data import ImageData


class RecordFile:
    """A file of images and labels, which the workers of this machine read, so that no graph contains them.

    Each record is a label, then an image, byte by byte.

    Args:
      data: the images, an attribute too.
      path: of the file.
    """

    def __init__(self, data: ImageData, path: pathlib.Path) -> None:
        self.data, self._path = data, path
        np.concatenate([data.labels[:, None], data.images.reshape(len(data.images), -1)], axis=1).tofile(path)

    def minibatches(self, batch_size: int, worker: int, workers: int, seed: int) -> tf.data.Dataset:
        """Returns a worker's part of the images, repeated without end and shuffled for each repetition.

        Returns:
          Pairs of images, float32 [batch_size, height, width, channels] from 0 to 1, and labels, int32 [batch_size].
        """
        # The order depends on this seed, too.
        tf.random.set_seed(seed)
        data = self.data

        def decoded(records: Any) -> Any:
            values = tf.reshape(tf.io.decode_raw(records, tf.uint8), [batch_size, -1])
            images = tf.reshape(tf.cast(values[:, 1:], tf.float32) / data.highest, [batch_size, *data.shape])
            return images, tf.cast(values[:, 0], tf.int32)

        records = tf.data.FixedLengthRecordDataset(str(self._path), 1 + int(np.prod(data.shape)))
        part = records.shard(workers, worker).cache().shuffle(len(data.images), seed=seed)
        return part.repeat().batch(batch_size, drop_remainder=True).map(decoded).prefetch(2)
