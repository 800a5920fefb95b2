"""Tests of which variables are sharded, where their parts are, and what values they get."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.recovery.variable_store import VariableStore
from tests.ps_strategy.sharded.partitioners import partitioned

VALUE = np.arange(20, dtype=np.float32).reshape(10, 2)
partitioners = tf.distribute.experimental.partitioners


def devices(variable):
    return [part.device for part in variable.variables]


def test_a_partitioner_of_tensorflow_divides_variables_as_its_layout_says(strategy):
    with strategy.scope(), partitioned(partitioners.FixedShardsPartitioner(4)):
        table = tf.Variable(VALUE)
        scalar = tf.Variable(1.0)
        few = tf.Variable([1.0, 2.0])
    assert [part.shape[0] for part in table.variables] == [3, 3, 2, 2]
    assert [part.shape[0] for part in few.variables] == [1, 1]
    assert not hasattr(scalar, "variables")
    assert devices(table)[:2] == devices(table)[2:]
    assert len(set(devices(table))) == 2
    np.testing.assert_array_equal(table.numpy(), VALUE)


def test_parts_have_a_least_and_a_largest_size(strategy):
    def sizes(partitioner, rows):
        with strategy.scope(), partitioned(partitioner):
            return [part.shape[0] for part in getattr(tf.Variable(tf.zeros([rows, 1])), "variables", ())]

    least = partitioners.MinSizePartitioner(min_shard_bytes=64, max_shards=2)
    assert (sizes(least, 16), sizes(least, 128)) == ([], [64, 64])
    for most, expected in ((4, [1] * 6), (8, [2] * 3), (1024, [])):
        assert sizes(partitioners.MaxSizePartitioner(max_shard_bytes=most), 6) == expected
    assert sizes(partitioners.MaxSizePartitioner(max_shard_bytes=4, max_shards=2), 6) == [3, 3]


def test_other_results_of_a_partitioner_are_refused(strategy):
    for wrong in (None, [], [0, 1], [2, 2]):
        partitioner = partitioned(lambda shape, dtype, wrong=wrong: wrong)
        with strategy.scope(), partitioner, pytest.raises(ValueError, match="must return"):
            tf.Variable(VALUE)


def test_initializers_may_return_a_part(strategy):
    calls = []

    def by_part(partition_shape, partition_offset):
        calls.append((tuple(partition_shape), tuple(partition_offset)))
        return tf.fill(partition_shape, float(partition_offset[0]))

    with strategy.scope(), partitioned(3):
        table = tf.Variable(by_part, shape=[10, 2], dtype=tf.float32)
        whole = tf.Variable(lambda: tf.constant(VALUE), shape=[10, 2], dtype=tf.float32)
        unknown = tf.Variable(lambda: tf.constant(VALUE))
    assert calls == [((4, 2), (0, 0)), ((3, 2), (4, 0)), ((3, 2), (7, 0))]
    assert table.numpy()[:, 0].tolist() == [0] * 4 + [4] * 3 + [7] * 3
    np.testing.assert_array_equal(whole.numpy(), VALUE)
    np.testing.assert_array_equal(unknown.numpy(), VALUE)


def test_a_large_part_is_initialized_block_by_block(strategy, monkeypatch):
    monkeypatch.setattr("coordinator.ps_strategy.sharded.creation.BLOCK_BYTES", 32)
    asked = []

    def by_part(partition_shape, partition_offset):
        asked.append((partition_offset[0], partition_shape[0]))
        return tf.constant(VALUE)[partition_offset[0] :][: partition_shape[0]]

    with strategy.scope(), partitioned(2):
        table = tf.Variable(by_part, shape=[10, 2], dtype=tf.float32)
    # Of 4 rows each, wherever the parts begin.
    assert asked == [(0, 4), (4, 1), (5, 3), (8, 2)]
    np.testing.assert_array_equal(table.numpy(), VALUE)


def test_a_large_value_that_no_part_can_be_had_of_is_refused(strategy):
    with strategy.scope(), partitioned(2), pytest.raises(ValueError, match="would take 512 MB on each"):
        tf.Variable(lambda: tf.zeros([2**21, 64]), shape=[2**21, 64], dtype=tf.float32)


def test_a_variable_of_keras_has_the_values_that_it_has_in_one_piece(strategy):
    for initializer in ("zeros", "uniform", "truncated_normal", "glorot_uniform", "orthogonal"):
        keras.utils.set_random_seed(1)
        whole = keras.Variable(keras.initializers.get(initializer), shape=(10, 2), dtype="float32")
        keras.utils.set_random_seed(1)
        with strategy.scope(), partitioned(3):
            table = keras.Variable(keras.initializers.get(initializer), shape=(10, 2), dtype="float32")
        assert len(table.value.variables) == 3
        np.testing.assert_array_equal(np.asarray(table), np.asarray(whole), err_msg=initializer)


def test_large_random_values_do_not_depend_on_the_number_of_parts(strategy, monkeypatch, recorded_functions):
    monkeypatch.setattr("coordinator.ps_strategy.sharded.creation.BLOCK_BYTES", 64)
    store = VariableStore(recorded_functions)
    monkeypatch.setattr(strategy.extended, "_variables", store)
    tables = []
    for parts in (2, 3):
        with strategy.scope(), partitioned(parts):
            tables.append(keras.Variable(keras.initializers.RandomNormal(seed=7), shape=(41, 4), dtype="float32"))
    values = np.asarray(tables[0])
    assert np.unique(values).size == values.size
    np.testing.assert_array_equal(np.asarray(tables[1]), values)
    store.renew()
    store.initialize_rest()
    for table in tables:
        np.testing.assert_array_equal(np.asarray(table), values)


def test_slots_are_sharded_like_their_variable(strategy):
    with strategy.scope(), partitioned(3):
        table = keras.Variable(VALUE)
        optimizer = keras.optimizers.Adam()
        optimizer.build([table])
        with strategy.extended.colocate_vars_with(table.value):
            beside = tf.Variable(tf.ones([10]))
            scalar = tf.Variable(1.0)
    slots = [slot for slot in optimizer.variables if slot.shape == (10, 2)]
    assert len(slots) == 2
    for slot in (*[slot.value for slot in slots], beside):
        assert devices(slot) == devices(table.value)
        assert [part.shape[0] for part in slot.variables] == [4, 3, 3]
    assert scalar.device == devices(table.value)[0]
