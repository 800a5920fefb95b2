"""Tests of what optimizers do to the rows of a table: the same as Keras to those of a variable."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.embeddings import Constant, RowwiseAdagrad
from coordinator.ps_strategy.keras.internals.row_updates import RowOptimizer
from tests.embeddings.tables import DIM, Trainer, make_table

KEYS = np.array([7, 10**12, -3, 8])
GRADIENTS = np.random.default_rng(1).normal(size=(4, len(KEYS), DIM)).astype(np.float32)


OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True, global_clipnorm=0.5),
    "AdamW": lambda: keras.optimizers.AdamW(0.01),
    "Adamax": lambda: keras.optimizers.Adamax(0.01),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "Lion": lambda: keras.optimizers.Lion(0.01),
    "RowwiseAdagrad": lambda: RowwiseAdagrad(0.1),
    "schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_rows_change_as_those_of_a_keras_variable(strategy, kind):
    table = make_table(strategy, optimizer=OPTIMIZERS[kind](), initializer=Constant(0.5))
    trainer = Trainer(strategy, table)
    variable, optimizer = keras.Variable(np.full([len(KEYS), DIM], 0.5, np.float32)), OPTIMIZERS[kind]()
    for gradient in GRADIENTS:
        trainer.train(KEYS, gradient)
        optimizer.apply([tf.constant(gradient)], [variable])
    np.testing.assert_allclose(table.lookup(KEYS), variable, atol=1e-6)


@pytest.mark.long
def test_the_learning_rate_can_be_set(strategy):
    table = make_table(strategy, optimizer=keras.optimizers.SGD(0.25), initializer=Constant(0.0))
    assert table.learning_rate == 0.25
    table.learning_rate = 2.0
    Trainer(strategy, table).train([1, 2])
    np.testing.assert_array_equal(table.lookup([1, 2]), np.full([2, DIM], -2.0))


def test_optimizers_that_need_more_than_rows_are_refused():
    for optimizer, reason in (
        (keras.optimizers.Lamb(), "Lamb computes with whole variables, and a table has none"),
        (keras.optimizers.SGD(gradient_accumulation_steps=2), "cannot have gradient_accumulation_steps"),
        (keras.optimizers.Adam(use_ema=True), "cannot have use_ema"),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "not a LossScaleOptimizer"),
    ):
        with pytest.raises(ValueError, match=reason):
            RowOptimizer(optimizer, DIM)
