"""Tests that what is replaced of Keras' optimizers for tables is what Keras uses, and is put back."""

import keras
import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.keras.internals.patches import structured_inputs
from coordinator.ps_strategy.keras.internals.row_updates import table_updates
from coordinator.ps_strategy.tensorflow_internals.unstored_variable import TableVariable
from tests.ps_strategy.tensorflow_internals.private_names import table_update_hooks

SHAPE = (1000, 2)


def test_the_patches_are_undone():
    known = table_update_hooks()
    with table_updates():
        assert not {*known} & {*table_update_hooks()}
    assert table_update_hooks() == known


def test_optimizers_clip_a_tables_gradient_with_the_others_and_leave_it_to_the_table():
    given = []
    table = TableVariable("table", list(SHAPE), tf.float32, given.append, lambda: None)
    weight = keras.Variable(np.zeros(2, np.float32))
    keys = tf.constant([10**15, 7, 10**15], tf.int64)
    rows = tf.IndexedSlices(tf.constant([[1.0, 0.0], [0.0, 4.0], [2.0, 0.0]]), keys, tf.constant(SHAPE))
    with table_updates():
        for optimizer in (
            keras.optimizers.SGD(1.0, global_clipnorm=6.5, momentum=0.9),
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0, global_clipnorm=6.5 / 8.0), 8.0),
        ):
            weight.assign([0.0, 0.0])
            optimizer.apply([rows, tf.constant([12.0, 0.0])], [table, weight])
            # The norm of all is 13, with the two rows of one key summed first.
            scale = 8.0 if hasattr(optimizer, "inner_optimizer") else 1.0
            np.testing.assert_allclose(weight, [-6.0 / scale, 0.0], rtol=1e-6)
            np.testing.assert_array_equal(given[-1].indices, [10**15, 7])
            np.testing.assert_allclose(given[-1].values, np.array([[1.5, 0.0], [0.0, 2.0]]) / scale, rtol=1e-6)
            assert all(each.shape != SHAPE for each in optimizer.variables)
    assert len(given) == 2


def test_the_inputs_of_a_model_are_nested_as_it_is_called():
    inputs = {"a": keras.Input((1,), name="a"), "b": keras.Input((1,), name="b")}
    functional = keras.Model(inputs, keras.layers.Add()(list(inputs.values())))
    assert {key: each.name for key, each in structured_inputs(functional).items()} == {"a": "a", "b": "b"}
    sequential = keras.Sequential([keras.Input((3,), name="z"), keras.layers.Dense(1)])
    assert [each.name for each in tf.nest.flatten(structured_inputs(sequential))] == ["z"]
    assert structured_inputs(keras.Model()) is None
