"""Tests of reads of models during a pull: layers, rows of embeddings, large variables."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.fusing.message_packing import MAX_PACKED_BYTES
from tests.updates.descent import mostly_long
from tests.updates.transport.pull_steps import new_rule, reads_of, result, traced

LAYERS = {
    "recurrent": lambda: keras.layers.GRU(4),
    "mixed precision": lambda: keras.layers.Dense(3, dtype="mixed_bfloat16"),
}


@pytest.mark.parametrize("name", mostly_long(LAYERS, "mixed precision"))
def test_a_layer_has_the_same_gradients_as_without_a_pull(strategy, name):
    with strategy.scope():
        layer = LAYERS[name]()
        layer.build((None, 5, 3))
        trained = [variable.value for variable in layer.trainable_variables]
        rule = new_rule(layer.trainable_variables)

    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(layer(x), tf.float32) ** 2)
        return loss, tape.gradient(loss, trained)

    @tf.function
    def step(x):
        with rule.pull() as version:
            inside = gradients(x)
        usual = gradients(x)
        return inside, usual, rule.push(inside[1], version)

    inside, usual, _ = result(strategy, step, tf.random.stateless_normal([2, 5, 3], (1, 2)))
    for found, other in zip(tf.nest.flatten(inside), tf.nest.flatten(usual), strict=True):
        assert np.any(found)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-6)


def test_rows_of_an_embedding_are_looked_up_and_changed_without_reading_the_rest(strategy):
    initial = np.arange(20.0, dtype=np.float32).reshape(10, 2)
    with strategy.scope():
        layer = keras.layers.Embedding(10, 2, weights=initial)
        table, dense = layer.embeddings.value, tf.Variable([1.0, 1.0])
        rule = new_rule([table, dense], embeddings=[table])

    @tf.function
    def step(ids):
        with rule.pull() as version:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) * dense) + tf.reduce_sum(layer(ids))
            gradients = tape.gradient(loss, [table, dense])
        assert isinstance(gradients[0], tf.IndexedSlices)
        return rule.push(gradients, version), loss

    ids = tf.constant([1, 3, 3])
    assert set(reads_of(traced(strategy, step, ids), table)) == {"ResourceGather"}
    _, loss = result(strategy, step, ids)
    assert loss == 2 * (2 + 3 + 2 * (6 + 7))
    initial[1] -= 2 * 0.5
    initial[3] -= 4 * 0.5
    np.testing.assert_allclose(table.numpy(), initial)
    # The dense variable, and three rows for each of both lookups.
    assert rule.statistics().bytes_pulled == 4 * 2 + 2 * 3 * 2 * 4
    np.testing.assert_allclose(dense.numpy(), [1 - 0.5 * (2 + 6 + 6), 1 - 0.5 * (3 + 7 + 7)])


def test_rows_of_a_copied_variable_come_from_its_copy(strategy):
    with strategy.scope():
        table = tf.Variable(tf.reshape(tf.range(20.0), [10, 2]))
        rule = new_rule([table])

    @tf.function
    def step(ids):
        with rule.pull(), tf.GradientTape() as tape:
            table.assign_add(tf.ones([10, 2]))
            rows, elements = tf.nn.embedding_lookup(table, ids), tf.gather_nd(table, [[3, 1]])
            loss = tf.reduce_sum(rows) + tf.reduce_sum(elements)
        return rows, elements, tf.convert_to_tensor(tape.gradient(loss, table))

    ids = tf.constant([1, 3])
    assert reads_of(traced(strategy, step, ids), table) == ["ReadVariableOp"]
    rows, elements, gradient = result(strategy, step, ids)
    np.testing.assert_array_equal(rows, [[2.0, 3.0], [6.0, 7.0]])
    np.testing.assert_array_equal(elements, [7.0])
    expected = np.zeros([10, 2])
    expected[1], expected[3] = [1, 1], [1, 2]
    np.testing.assert_array_equal(gradient, expected)


def test_a_large_variable_is_read_only_when_it_is_used(strategy):
    with strategy.scope():
        large = tf.Variable(tf.ones([MAX_PACKED_BYTES // 4 + 1]))
        small = tf.Variable(1.0)
        rule = new_rule([large, small])

    @tf.function
    def without():
        with rule.pull():
            return small.read_value()

    @tf.function
    def using():
        with rule.pull(), tf.GradientTape() as tape:
            total = tf.zeros([])
            for _ in tf.range(2):
                total += tf.reduce_sum(large)
            loss = total + tf.reduce_sum(large) + small
        return loss, tf.reduce_sum(tape.gradient(loss, large))

    with pytest.raises(ValueError, match="not enough values"):
        reads_of(traced(strategy, without), large)
    assert reads_of(traced(strategy, using), large) == ["ReadVariableOp"]
    size = large.shape[0]
    assert result(strategy, using) == (3 * size + 1, 3 * size)
    assert rule.statistics().bytes_pulled == 4 * (size + 1)
