"""Synthetic advertisements as in Criteo's logs: shown, and clicked on or not.

Source of the shape: Criteo's display advertising challenge: 13 counts, 26 categories, a label that is seldom 1.
"""

import tensorflow as tf

COUNTS = 13
CATEGORIES = 26
ROWS = 260_000
# This number of batches is generated once and then repeated: the pipeline should cost almost nothing.
_BATCHES = 16
_SEED = 7
# Raw categories are larger numbers than there are rows, and most of them are rare.
_VALUES = 10_000_000.0
_SKEW = 4.0
_MULTIPLIER = 2_654_435_761


def criteo_like(batch_size: int) -> tf.data.Dataset:
    """Returns endless batches `(counts [batch, 13] float32, rows [batch, 26] int64, labels [batch, 1] float32)`.

    `rows` are the categories, hashed to numbers from 0 to below `ROWS`.
    """

    def make(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        seed = tf.stack([tf.constant(_SEED, tf.int64), number])
        counts = tf.math.log1p(tf.exp(tf.random.stateless_normal([batch_size, COUNTS], seed)))
        uniform = tf.random.stateless_uniform([batch_size, CATEGORIES], seed + 1, dtype=tf.float64)
        category = tf.cast(uniform**_SKEW * _VALUES, tf.int64) * CATEGORIES + tf.range(CATEGORIES, dtype=tf.int64)
        rows = tf.math.floormod(category * _MULTIPLIER, ROWS)
        clicked = counts[:, :1] + tf.random.stateless_normal([batch_size, 1], seed + 2) > 1.8
        return counts, rows, tf.cast(clicked, tf.float32)

    return tf.data.Dataset.range(_BATCHES).map(make).cache().repeat().prefetch(2)
