"""Tests of tables: keys get rows when they are trained on, and gradients change them."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.embeddings import Table, Uniform
from coordinator.ps_strategy.fusing.graph_copies import GraphCopies
from coordinator.ps_strategy.tensorflow_internals.functions import built_function
from tests.embeddings.tables import DIM, TIMEOUT, Trainer, make_step, make_table, subtract
from tests.ps_strategy.fusing.fused_calls import COUNT, STEPS, FusedCalls


def initial(*keys):
    return Uniform()(tf.constant(keys, tf.int64), DIM).numpy()


def test_keys_get_rows_in_training_alone(strategy):
    table = make_table(strategy, default=0.25)
    keys = tf.constant([3, 10**15, -7], tf.int64)
    np.testing.assert_array_equal(table.lookup(keys), np.full([3, DIM], 0.25))
    assert table.size() == 0
    rows = Trainer(strategy, table).train([[3, 10**15], [-7, 3]])
    np.testing.assert_allclose(rows, initial(3, 10**15, -7, 3).reshape(2, 2, DIM))
    assert table.size() == 3
    # The gradient of key 3 is the sum of its two places.
    changes = table.lookup(keys) - initial(3, 10**15, -7)
    np.testing.assert_allclose(changes, [[-1.0] * DIM, [-0.5] * DIM, [-0.5] * DIM], atol=1e-6)
    np.testing.assert_array_equal(table.lookup([[4]]), np.full([1, 1, DIM], 0.25))
    statistics = table.statistics()
    assert (statistics.size, statistics.admitted, statistics.steps, statistics.dropped) == (3, 3, 1, 0)
    # A row, its key, stamp, and place on the list of free ones.
    assert statistics.bytes == 3 * (DIM * 4 + 8 + 8 + 8)


def test_several_look_ups_in_one_step_add_up(strategy):
    table = make_table(strategy)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table.lookup([1, 2], training=True)) + tf.reduce_sum(table.lookup([2], training=True))
        gradient = tape.gradient(loss, table.variable)
        table.apply_gradients(gradient)
        return gradient.dense_shape

    assert strategy.schedule(step).result(TIMEOUT).tolist() == [1000, DIM]
    np.testing.assert_allclose(table.lookup([1, 2]) - initial(1, 2), [[-0.5] * DIM, [-1.0] * DIM], atol=1e-6)


@pytest.mark.long
def test_racing_workers_lose_no_addition_and_make_one_row_for_a_key(strategy, monkeypatch):
    table = make_table(strategy, 4000)
    fused = FusedCalls(strategy, monkeypatch)
    random = np.random.default_rng(0)
    batches = [random.integers(0, 500, 40) for _ in range(2 * COUNT)]
    fused.run(make_step(table), [(batch, np.ones([40, DIM], np.float32)) for batch in batches])
    assert STEPS in fused.sizes
    keys, counts = np.unique(np.concatenate(batches), return_counts=True)
    np.testing.assert_allclose(initial(*keys) - table.lookup(keys), 0.5 * np.outer(counts, np.ones(DIM)), atol=1e-4)
    contents = [shard.read_rows(0, 4000) for shard in table.shards]
    assert sorted(np.concatenate([content[0].numpy() for content in contents])) == keys.tolist()
    statistics = table.statistics()
    assert (statistics.size, statistics.steps) == (len(keys), len(batches))


@pytest.mark.long
def test_messages_of_several_tables_are_shared(strategy):
    tables = [make_table(strategy) for _ in range(3)]

    def messages(tables):
        @tf.function
        def step(keys):
            return [table.lookup(keys, training=True) for table in tables]

        concrete = step.get_concrete_function(tf.TensorSpec([None], tf.int64))
        copies = GraphCopies(concrete, 1)
        packed = []

        def body(*given):
            copies.note_inputs(given)
            return copies.add(given, "")

        built_function(
            body,
            [tf.TensorSpec(each.shape, each.dtype) for each in concrete.inputs],
            lambda graph: packed.append(copies.pack_transfers(graph)),
        )
        return packed[0]

    # One to each of the two servers and one back, for all three tables.
    assert messages(tables) == 4


def test_what_is_no_gradient_of_the_table_is_refused(strategy):
    table = make_table(strategy)
    for wrong in (None, tf.ones([2, DIM])):
        with pytest.raises(TypeError, match=r"gradient of the table 'words' must be the tf\.IndexedSlices"):
            table.apply_gradients(wrong)
    with pytest.raises(NotImplementedError, match="'words' cannot be read as a whole"):
        tf.convert_to_tensor(table.variable)
    with pytest.raises(RuntimeError, match=r"created inside strategy\.scope"):
        Table("words", DIM, 10, subtract)


def test_a_table_that_does_not_fit_the_machine_is_refused(strategy):
    with pytest.raises(ValueError, match=r"The table 'words' does not fit: when it is full, it takes \d+\.\d GB on"):
        make_table(strategy, 10**11)
    for wrong in ({"when_full": "wait"}, {"admission": 3}, {"eviction": [3]}, {"optimizer": "adam"}, {"capacity": 0}):
        with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
            make_table(strategy, **wrong)
