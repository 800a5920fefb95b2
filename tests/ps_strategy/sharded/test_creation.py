"""Tests of which variables are sharded, where their parts are, what values they get, also after a loss."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.recovery.variable_store import VariableStore
from coordinator.ps_strategy.sharded.creation import Placement
from coordinator.ps_strategy.sharded.sharded_variable import ShardedVariable
from tests.ps_strategy.sharded.partitioners import partitioned, sharded

VALUE = np.arange(20, dtype=np.float32).reshape(10, 2)
tf_partitioners = tf.distribute.experimental.partitioners


def devices(variable):
    return [part.device for part in variable.variables]


def test_a_partitioner_of_tensorflow_divides_variables_as_its_layout_says(strategy):
    with strategy.scope(), partitioned(tf_partitioners.FixedShardsPartitioner(4)):
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

    least = tf_partitioners.MinSizePartitioner(min_shard_bytes=64, max_shards=2)
    assert (sizes(least, 16), sizes(least, 128)) == ([], [64, 64])
    for most, expected in ((4, [1] * 6), (8, [2] * 3), (1024, [])):
        assert sizes(tf_partitioners.MaxSizePartitioner(max_shard_bytes=most), 6) == expected
    assert sizes(tf_partitioners.MaxSizePartitioner(max_shard_bytes=4, max_shards=2), 6) == [3, 3]


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


@pytest.mark.long
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


TIMEOUT = 120.0
NUMBERS = np.arange(8, dtype=np.float32)


def divided(variable):
    """Returns the rows of each part."""
    return [part.numpy().tolist() for part in variable.variables]


def test_variables_made_in_a_function_are_divided_too(strategy):
    made = []

    @tf.function
    def make():
        if not made:
            made.append(tf.Variable([[1.0, 0.0], [0.0, 1.0]]))
            made.append(tf.Variable(lambda: tf.eye(2)))
            made.append(tf.Variable(lambda: tf.eye(2), shape=[2, 2], dtype=tf.float32))
        return tf.reduce_sum([tf.gather(each, [1, 0]) for each in made], axis=0)

    with strategy.scope(), partitioned(2):
        rows = make()
    for variable in made:
        assert isinstance(variable, ShardedVariable)
        assert divided(variable) == [[[1, 0]], [[0, 1]]]
        assert len({part.device for part in variable.variables}) == 2
    np.testing.assert_array_equal(rows, 3 * np.eye(2)[::-1])
    np.testing.assert_array_equal(strategy.schedule(make).result(TIMEOUT), rows)


def test_a_variable_is_divided_whose_shape_or_dtype_its_value_tells(strategy):
    for known in ({"shape": [4]}, {"dtype": tf.int64}, {}):
        with strategy.scope(), partitioned(2, rank=1):
            table = tf.Variable(lambda: tf.range(4, dtype=tf.int64), **known)
        assert table.dtype == tf.int64, known
        assert divided(table) == [[0, 1], [2, 3]], known


def test_a_variable_that_aggregates_is_divided_and_changed_by_every_call(strategy):
    table = sharded(strategy, np.zeros_like(NUMBERS), 2, aggregation=tf.VariableAggregation.MEAN)
    assert table.aggregation is tf.VariableAggregation.MEAN
    assert {type(part) for part in table.variables} == {type(part) for part in sharded(strategy, NUMBERS).variables}

    @tf.function
    def step(value):
        def update():
            table.assign(value)
            table.scatter_add(tf.IndexedSlices([10.0, 20.0], [7, 0]))
            return table.assign_add(value)

        return strategy.run(update)

    expected = 2 * NUMBERS + [20, 0, 0, 0, 0, 0, 0, 10]
    np.testing.assert_array_equal(strategy.schedule(step, args=(NUMBERS,)).result(TIMEOUT), expected)
    assert divided(table) == [expected[:4].tolist(), expected[4:].tolist()]


def test_a_variable_beside_a_part_stays_whole(strategy):
    table = sharded(strategy, NUMBERS)
    for part in table.variables:
        with strategy.scope(), partitioned(2, rank=1), strategy.extended.colocate_vars_with(part):
            beside = tf.Variable([4, 5])
        assert not isinstance(beside, ShardedVariable)
        assert beside.device == part.device
        np.testing.assert_array_equal(beside, [4, 5])


def test_parts_are_always_the_same_variables_and_belong_to_the_whole_alone(strategy):
    table = sharded(strategy, NUMBERS)
    assert [id(part) for part in table.variables] == [id(part) for part in table] == [id(part) for part in table.parts]
    # Gradients and training are those of the whole; a part has no name for it, as TensorFlow's `_sharded_container`.
    assert not any(part.trainable or hasattr(part, "_sharded_container") for part in table.variables)
    assert table.trainable
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table**2)
    whole, *parts = tape.gradient(loss, [table, *table.variables])
    np.testing.assert_array_equal(tf.convert_to_tensor(whole), 2 * NUMBERS)
    assert parts == [None, None]


MB = 2**20


@pytest.fixture
def placed():
    """Returns a function that places variables of these sizes in MB, one after the other or as parts of one."""
    variables: list = []
    placement = Placement(("a", "b", "c"), lambda: variables)

    def place(sizes, at_once=False):
        devices = []
        for group in [sizes] if at_once else [[size] for size in sizes]:
            found = placement.next_devices([int(size * MB) for size in group])
            variables.extend(
                types.SimpleNamespace(device=device, shape=tf.TensorShape([int(size * MB / 4)]), dtype=tf.float32)
                for device, size in zip(found, group, strict=True)
            )
            devices += found
        return "".join(devices)

    return place


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("sizes", [[0.01, 0.5, 0, 0.9] * 2, [4, 3.9, 3.9, 3.9, 3.8], [64, 63, 63, 64]])
def test_equal_and_small_variables_are_placed_in_turn(placed, sizes, at_once):
    assert placed(sizes, at_once) == ("abc" * 3)[: len(sizes)]


def test_large_variables_and_parts_go_where_the_fewest_bytes_are(placed):
    assert placed([200]) == "a"
    # The parts of one variable count for each other.
    assert placed([50, 50, 50, 50], at_once=True) == "bcbc"


def ones(partition_shape, partition_offset):
    return tf.ones(partition_shape)


def test_parts_are_recreated_in_the_same_objects(strategy, monkeypatch, tmp_path, recorded_functions):
    store = VariableStore(recorded_functions)
    monkeypatch.setattr(strategy.extended, "_variables", store)
    saved = sharded(strategy, VALUE, 3)
    with strategy.scope(), partitioned(3):
        unsaved = tf.Variable(ones, shape=[10, 2], dtype=tf.float32)
    checkpoint = tf.train.Checkpoint(table=saved)
    path = checkpoint.write(str(tmp_path / "saved"))

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(saved, ids) + tf.gather(unsaved, ids))
        for table, gradient in zip((saved, unsaved), tape.gradient(loss, (saved, unsaved)), strict=True):
            table.scatter_add(gradient)

    strategy.schedule(step, args=([9, 0, 4],)).result(TIMEOUT)
    store.renew()
    assert not bool(saved.is_initialized())
    checkpoint.read(path)
    store.initialize_rest()
    np.testing.assert_array_equal(saved.numpy(), VALUE)
    np.testing.assert_array_equal(unsaved.numpy(), np.ones_like(VALUE))
    strategy.schedule(step, args=([9, 0, 4],)).result(TIMEOUT)
    assert (saved.numpy() - VALUE)[:, 0].tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 0, 1]
