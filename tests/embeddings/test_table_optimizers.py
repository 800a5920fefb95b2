"""Tests of what optimizers do to the rows of a table, and of Adagrad with one accumulator for each row."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.embeddings import Constant, RowwiseAdagrad
from coordinator.ps_strategy.keras.internals.row_updates import RowOptimizer
from tests.embeddings.tables import DIM, Trainer, make_table
from tests.updates.descent import mostly_long

KEYS = np.array([7, 10**12, -3, 8])
GRADIENTS = np.random.default_rng(1).normal(size=(4, len(KEYS), DIM)).astype(np.float32)


# Those of which each does something that the others do not.
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True, global_clipnorm=0.5),
    "AdamW": lambda: keras.optimizers.AdamW(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "RowwiseAdagrad": lambda: RowwiseAdagrad(0.1),
}


@pytest.mark.parametrize("kind", mostly_long(OPTIMIZERS, "AdamW"))
def test_rows_change_as_those_of_a_keras_variable(strategy, kind):
    table = make_table(strategy, optimizer=OPTIMIZERS[kind](), initializer=Constant(0.5))
    trainer = Trainer(strategy, table)
    variable, optimizer = keras.Variable(np.full([len(KEYS), DIM], 0.5, np.float32)), OPTIMIZERS[kind]()
    for gradient in GRADIENTS:
        trainer.train(KEYS, gradient)
        optimizer.apply([tf.constant(gradient)], [variable])
    np.testing.assert_allclose(table.lookup(KEYS), variable, atol=1e-6)


def test_optimizers_that_need_more_than_rows_are_refused():
    for optimizer, reason in (
        (keras.optimizers.Lamb(), "Lamb computes with whole variables, and a table has none"),
        (keras.optimizers.SGD(gradient_accumulation_steps=2), "cannot have gradient_accumulation_steps"),
        (keras.optimizers.Adam(use_ema=True), "cannot have use_ema"),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "not a LossScaleOptimizer"),
    ):
        with pytest.raises(ValueError, match=reason):
            RowOptimizer(optimizer, DIM)


TABLE = np.random.default_rng(0).normal(size=(4, DIM)).astype(np.float32)


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
