"""Tests that optimizers of Keras change the rows of sharded variables and of their slots as in one piece."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.ps_strategy.keras.test_optimizers import CHANGE_WHOLE_VARIABLES, DENSE_ONLY, OPTIMIZERS
from tests.ps_strategy.sharded.partitioners import partitioned

TIMEOUT = 240.0
VALUE = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
IDS = np.array([9, 1, 5, 1, 9, 4])
GRADIENT = np.random.default_rng(1).normal(size=(len(IDS), 3)).astype(np.float32)
ALL = [name for name in OPTIMIZERS if name not in {*CHANGE_WHOLE_VARIABLES, *DENSE_ONLY}]
SOME = ["SGD, Nesterov's", "Adam, AMSGrad", "AdamW", "Ftrl"]


@pytest.mark.parametrize("names", [SOME, pytest.param(ALL, marks=pytest.mark.long)], ids=["some", "all"])
def test_rows_and_slots_change_as_in_one_piece(strategy, names):
    trained = {}
    with strategy.scope():
        for name in names:
            for parts in (1, 3):
                with partitioned(parts):
                    table, optimizer = keras.Variable(VALUE), OPTIMIZERS[name]()
                    optimizer.build([table])
                trained[name, parts] = table, optimizer

    @tf.function
    def step():
        for table, optimizer in trained.values():
            optimizer.apply([tf.IndexedSlices(tf.constant(GRADIENT), IDS, tf.constant([10, 3]))], [table])

    for _ in range(3):
        strategy.schedule(step).result(TIMEOUT)
    for name in names:
        (whole, one), (table, other) = trained[name, 1], trained[name, 3]
        assert len(table.value.variables) == 3
        assert np.abs(table.numpy() - VALUE).max() > 0
        for expected, found in zip([whole, *one.variables], [table, *other.variables], strict=True):
            np.testing.assert_allclose(found.numpy(), expected.numpy(), 1e-6, 1e-7, err_msg=f"{name}, {found.path}")
