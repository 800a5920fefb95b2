"""Variables for several tests of update rules."""

import pytest
import tensorflow as tf


@pytest.fixture
def variables(strategy):
    """One on each of the two servers."""
    with strategy.scope():
        return [tf.Variable(lambda: tf.zeros([3])), tf.Variable(lambda: tf.zeros([4, 2]))]
