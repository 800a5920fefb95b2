"""Variables for several tests of update rules."""

import pytest
import tensorflow as tf


@pytest.fixture
def variables(strategy):
    """One on each of the two servers."""
    with strategy.scope():
        return [tf.Variable(lambda: tf.zeros([3])), tf.Variable(lambda: tf.zeros([4, 2]))]


@pytest.fixture
def weights(strategy):
    with strategy.scope():
        return [tf.Variable([0.0, 0.0]), tf.Variable(0.0)]


@pytest.fixture
def may_end(strategy):
    """Whether steps that are held may end."""
    with strategy.scope():
        return tf.Variable(False, trainable=False)


@pytest.fixture
def turn(strategy):
    """A counter that workers wait for in their steps."""
    with strategy.scope():
        return tf.Variable(0, dtype=tf.int64, trainable=False)
