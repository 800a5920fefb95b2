"""Tests of Adagrad with one accumulator for each row."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.embeddings import RowwiseAdagrad

TABLE = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
GRADIENTS = np.random.default_rng(1).normal(size=(3, 4, 3)).astype(np.float32)


def built(*values, **options):
    variables = [keras.Variable(value) for value in values]
    optimizer = RowwiseAdagrad(0.5, **options)
    optimizer.build(variables)
    return optimizer, variables


def test_a_row_is_divided_by_the_root_of_the_sum_of_its_mean_squares():
    optimizer, [table] = built(TABLE, initial_accumulator_value=0.25, epsilon=0.01)
    expected, accumulator = TABLE.copy(), np.full(4, 0.25)
    for gradient in GRADIENTS:
        optimizer.apply([tf.constant(gradient)], [table])
        accumulator += np.mean(gradient**2, axis=1)
        expected -= 0.5 * gradient / (np.sqrt(accumulator)[:, np.newaxis] + 0.01)
    np.testing.assert_allclose(table, expected, rtol=1e-5)
    np.testing.assert_allclose(optimizer.variables[-1], accumulator, rtol=1e-5)


def test_the_state_is_a_number_for_each_row_of_any_rank():
    shapes = [(), (5,), (4, 3), (4, 3, 2)]
    optimizer, variables = built(*(np.ones(shape, np.float32) for shape in shapes))
    slots = [each for each in optimizer.variables if each.path.endswith("accumulator")]
    assert [tuple(slot.shape) for slot in slots] == [(), (5,), (4,), (4,)]
    optimizer.apply([tf.fill(shape, 2.0) for shape in shapes], variables)
    for variable, slot in zip(variables, slots, strict=True):
        np.testing.assert_allclose(slot, np.full(slot.shape, 4.0))
        # All elements have the same gradient: its root is the gradient itself.
        np.testing.assert_allclose(variable, np.full(variable.shape, 0.5))


def test_without_a_strategy_a_sparse_gradient_is_summed_to_a_dense_one():
    ids, values = [2, 0, 2], GRADIENTS[0, :3]
    sparse_optimizer, [sparse] = built(TABLE)
    sparse_optimizer.apply([tf.IndexedSlices(values, ids, tf.constant([4, 3]))], [sparse])
    gradient = np.zeros_like(TABLE)
    np.add.at(gradient, ids, values)
    optimizer, [table] = built(TABLE)
    optimizer.apply([tf.constant(gradient)], [table])
    np.testing.assert_array_equal(sparse, table)
    # A row without any gradient stays.
    np.testing.assert_array_equal(np.asarray(table)[[1, 3]], TABLE[[1, 3]])


# Keras' own conversion, which NumPy 2 warns of.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
def test_it_is_saved_with_a_model(tmp_path):
    model = keras.Sequential([keras.layers.Embedding(4, 3), keras.layers.Dense(1)])
    model.compile(RowwiseAdagrad(0.25, initial_accumulator_value=0.5, epsilon=1e-3, weight_decay=0.1), "mse")
    model.fit(np.array([[1], [2]]), np.ones([2, 1, 1]), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, RowwiseAdagrad)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    for variable, expected in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(variable, expected)


def test_its_state_is_on_the_server_of_its_variable(strategy):
    with strategy.scope():
        optimizer, variables = built(*[TABLE] * 3)
    slots = [each for each in optimizer.variables if each.path.endswith("accumulator")]
    assert [slot.value.device for slot in slots] == [variable.value.device for variable in variables]
    assert len({slot.value.device for slot in slots}) == 2
    for wrong in ({"initial_accumulator_value": -1.0}, {"epsilon": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            RowwiseAdagrad(**wrong)
