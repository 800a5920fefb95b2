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


def test_a_checkpoint_has_one_tensor_of_the_whole_shape(strategy, tmp_path):
    path = tf.train.Checkpoint(table=sharded(strategy, VALUE, 3)).write(str(tmp_path / "saved"))
    assert dict(tf.train.list_variables(path))[KEY] == [10, 2]
    np.testing.assert_array_equal(tf.train.load_variable(path, KEY), VALUE)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_tensorflow_reads_what_is_saved_and_the_other_way_round(strategy, tmp_path, parts):
    table = sharded(strategy, VALUE, 3)
    path = tf.train.Checkpoint(table=table).write(str(tmp_path / "ours"))
    theirs = of_tensorflow(parts, np.zeros_like(VALUE))
    tf.train.Checkpoint(table=theirs).read(path).assert_consumed()
    np.testing.assert_array_equal(theirs.numpy(), VALUE)

    path = tf.train.Checkpoint(table=of_tensorflow(parts, VALUE + 1)).write(str(tmp_path / "theirs"))
    tf.train.Checkpoint(table=table).read(path).assert_consumed()
    np.testing.assert_array_equal(table.numpy(), VALUE + 1)


def test_a_value_may_be_restored_before_the_variable_exists(strategy, tmp_path):
    path = tf.train.Checkpoint(table=of_tensorflow(4)).write(str(tmp_path / "saved"))
    checkpoint = tf.train.Checkpoint()
    status = checkpoint.read(path)
    checkpoint.table = sharded(strategy, np.zeros_like(VALUE), 3)
    status.assert_consumed()
    np.testing.assert_array_equal(checkpoint.table.numpy(), VALUE)


def test_slots_are_restored_with_any_number_of_parts(strategy, tmp_path):
    trained = {}
    for parts in (1, 2, 3):
        with strategy.scope(), partitioned(parts):
            table, optimizer = keras.Variable(VALUE), keras.optimizers.Adam(0.1)
            optimizer.build([table])
        trained[parts] = table, optimizer

    def checkpoint(parts):
        return tf.train.Checkpoint(table=trained[parts][0], optimizer=trained[parts][1])

    def state(parts):
        table, optimizer = trained[parts]
        return [each.numpy() for each in (table, *optimizer.variables)]

    for saved, restored in ((3, 2), (2, 1), (1, 3)):
        for number, each in enumerate((trained[saved][0], *trained[saved][1].variables)):
            each.assign(each.numpy() + number + saved)
        path = checkpoint(saved).write(str(tmp_path / f"{saved}"))
        checkpoint(restored).read(path).assert_consumed()
        for expected, found in zip(state(saved), state(restored), strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.filterwarnings("ignore")  # TensorFlow's own, about names
def test_an_asynchronous_checkpoint_is_the_same(strategy, tmp_path):
    checkpoint = tf.train.Checkpoint(table=sharded(strategy, VALUE, 3))
    path = checkpoint.save(str(tmp_path / "saved"), tf.train.CheckpointOptions(enable_async=True))
    checkpoint.sync()
    np.testing.assert_array_equal(tf.train.load_variable(path, KEY), VALUE)


def test_a_checkpoint_of_another_shape_is_refused(strategy, tmp_path):
    path = tf.train.Checkpoint(table=tf.Variable(tf.zeros([12, 2]))).write(str(tmp_path / "saved"))
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="12"):
        tf.train.Checkpoint(table=sharded(strategy, VALUE, 3)).read(path)
