"""Variables for the tests of model averaging."""

import pytest
import tensorflow as tf


@pytest.fixture
def weights(strategy):
    with strategy.scope():
        return [tf.Variable([0.0, 0.0]), tf.Variable(0.0)]


@pytest.fixture
def turn(strategy):
    """A counter that workers wait for in their steps."""
    with strategy.scope():
        return tf.Variable(0, dtype=tf.int64, trainable=False)
