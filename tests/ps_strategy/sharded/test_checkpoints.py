"""Tests that checkpoints of sharded variables are those of TensorFlow's, and fit any number of parts."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.ps_strategy.sharded.partitioners import partitioned, sharded

VALUE = np.arange(20, dtype=np.float32).reshape(10, 2)
KEY = "table/.ATTRIBUTES/VARIABLE_VALUE"
# Private: TensorFlow has no public name for its own sharded variables.
Peer = tf.__internal__.distribute.ShardedVariable


def of_tensorflow(parts, value=VALUE):
    """Returns what TensorFlow's own strategy has; a plain variable for one part."""
    variables = [tf.Variable(rows) for rows in np.array_split(value, parts)]
    return Peer(variables, "table") if parts > 1 else variables[0]


def test_tensorflow_reads_what_is_saved_and_the_other_way_round(strategy, tmp_path):
    for parts in (1, 2, 4):
        table = sharded(strategy, VALUE, 3)
        path = tf.train.Checkpoint(table=table).write(str(tmp_path / "ours"))
        assert dict(tf.train.list_variables(path))[KEY] == [10, 2]
        theirs = of_tensorflow(parts, np.zeros_like(VALUE))
        tf.train.Checkpoint(table=theirs).read(path).assert_consumed()
        np.testing.assert_array_equal(theirs.numpy(), VALUE, err_msg=parts)

        path = tf.train.Checkpoint(table=of_tensorflow(parts, VALUE + 1)).write(str(tmp_path / "theirs"))
        tf.train.Checkpoint(table=table).read(path).assert_consumed()
        np.testing.assert_array_equal(table.numpy(), VALUE + 1, err_msg=parts)


def test_a_value_may_be_restored_before_the_variable_exists_if_its_shape_is_right(strategy, tmp_path):
    path = tf.train.Checkpoint(table=of_tensorflow(4)).write(str(tmp_path / "saved"))
    checkpoint = tf.train.Checkpoint()
    status = checkpoint.read(path)
    checkpoint.table = sharded(strategy, np.zeros_like(VALUE), 3)
    status.assert_consumed()
    np.testing.assert_array_equal(checkpoint.table.numpy(), VALUE)
    path = tf.train.Checkpoint(table=tf.Variable(tf.zeros([12, 2]))).write(str(tmp_path / "other"))
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="12"):
        tf.train.Checkpoint(table=checkpoint.table).read(path)


def test_slots_are_restored_with_any_number_of_parts(strategy, tmp_path):
    trained = {}
    for parts in (1, 2, 3):
        with strategy.scope(), partitioned(parts):
            table, optimizer = keras.Variable(VALUE), keras.optimizers.Adam(0.1)
            optimizer.build([table])
        trained[parts] = tf.train.Checkpoint(table=table, optimizer=optimizer), [table, *optimizer.variables]
    for saved, restored in ((3, 2), (2, 1), (1, 3)):
        checkpoint, variables = trained[saved]
        for number, each in enumerate(variables):
            each.assign(each.numpy() + number + saved)
        other, others = trained[restored]
        other.read(checkpoint.write(str(tmp_path / f"{saved}"))).assert_consumed()
        for expected, found in zip(variables, others, strict=True):
            np.testing.assert_array_equal(found.numpy(), expected.numpy())
