"""Tests of what optimizers do to the rows of a table: the same as Keras to those of a variable."""

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
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "Adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
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
