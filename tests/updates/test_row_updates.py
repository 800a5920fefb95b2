"""Tests that sparse gradients that are pushed to a rule change single rows, as Keras does for a dense gradient."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator import updates
from tests.updates.trained_twice import train_twice

ROWS, WIDTH, STEPS = 8, 2, 4
IDS = np.array([1, 5, 1, 6])
TOUCHED, OTHERS = [1, 5, 6], [0, 2, 3, 4, 7]
TABLE = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)

RULES = {
    "Asynchronous": updates.Asynchronous,
    "Asynchronous, its embeddings given": lambda optimizer, variables: updates.Asynchronous(
        optimizer, variables, embeddings=variables[:1]
    ),
    "Synchronous": lambda *given: updates.Synchronous(*given, grads_to_wait=1),
    "StaleSynchronous": lambda optimizer, variables: updates.StaleSynchronous(
        optimizer, variables, get_model_frequency=1, embeddings=variables[:1]
    ),
    "BoundedDelay": lambda *given: updates.BoundedDelay(*given, max_delay=2),
    "Delayed": lambda *given: updates.Delayed(*given, delay=math.inf),
    "ModelAverage": lambda optimizer, variables: updates.ModelAverage(optimizer, variables, embeddings=variables[:1]),
}
DEFAULT = {"Synchronous"}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in DEFAULT else pytest.mark.long) for each in RULES]
)
def test_pushed_rows_change_as_in_one_process_with_dense_gradients(strategy, name):
    def new():
        return [keras.Variable(TABLE), keras.Variable(np.ones([WIDTH], np.float32))], keras.optimizers.AdamW(0.05)

    def gradients(variables):
        table, bias = (each.value for each in variables)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(tf.gather(table, IDS)) * bias)
        return tape.gradient(loss, [table, bias])

    with strategy.scope():
        variables, optimizer = new()
        rule = RULES[name](optimizer, variables)

    here = train_twice(strategy, rule, variables, new, gradients, STEPS)
    np.testing.assert_allclose(np.asarray(variables[0])[TOUCHED], np.asarray(here[0])[TOUCHED], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(variables[0])[OTHERS], TABLE[OTHERS])
    if name != "ModelAverage":
        np.testing.assert_allclose(variables[1], here[1], rtol=1e-5)
    assert int(optimizer.iterations) == STEPS
