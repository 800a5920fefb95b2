"""Tests that each private attribute of Keras that the library uses exists and means what it assumes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.keras.internals import optimizers as keras_optimizers
from tests.ps_strategy.tensorflow_internals.private_names import (
    moving_averages,
    product_of_momenta,
    variables_trained_by,
)

UPDATES = 600


def built(optimizer, *values):
    variables = [keras.Variable(value) for value in values or ([1.0, 2.0], [3.0])]
    keras_optimizers.build(optimizer, variables)
    return optimizer, variables


def test_scalars_and_the_learning_rate_are_found_for_every_kind_of_rate():
    schedule = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
    optimizer = keras.optimizers.SGD(0.5)
    count, rate = keras_optimizers.scalar_variables(optimizer)
    optimizer.learning_rate = 0.25
    assert (count is optimizer.iterations.value, rate.numpy()) == (True, 0.25)
    scheduled = keras.optimizers.SGD(schedule)
    assert keras_optimizers.scalar_variables(scheduled) == [scheduled.iterations.value]
    given = [tf.constant(3, tf.int64), tf.constant(0.125, tf.float64)]
    for each in (optimizer, scheduled, keras.optimizers.SGD(lambda: 0.125)):
        found = keras_optimizers.learning_rate(each, given if each is optimizer else given[:1])
        assert found == 0.125
        assert each is not optimizer or found.dtype == tf.float32


def test_a_view_uses_the_count_and_rate_it_is_given_and_changes_none():
    results = []
    for count in (0, 4):
        optimizer, [first, _] = built(keras.optimizers.Adam(100.0))
        view = keras_optimizers.view_for_variables(optimizer, [first], [tf.constant(count), None], tf.constant(0.5))
        view.apply([tf.constant([2.0, 2.0])], [first])
        assert (int(optimizer.iterations), float(optimizer.learning_rate)) == (0, 100.0)
        results.append(first.numpy())
        optimizer, [first, _] = built(keras.optimizers.Adam(0.5))
        optimizer.iterations.assign(count)
        optimizer.apply([tf.constant([2.0, 2.0]), tf.constant([0.0])])
        np.testing.assert_allclose(results[-1], first, rtol=1e-6)
    assert not np.allclose(*results)


def test_the_product_of_nadams_momenta_is_found():
    optimizer, [first, _] = built(keras.optimizers.Nadam(0.1, beta_1=0.999))
    for count in range(UPDATES):
        if count in (0, 1, 2, 10, UPDATES - 1):
            view = keras_optimizers.view_for_variables(optimizer, [first], [tf.constant(count), None], 0.1)
            np.testing.assert_allclose(
                tf.convert_to_tensor(product_of_momenta(view)), product_of_momenta(optimizer), rtol=1e-4
            )
        # As Keras does at the beginning of an update.
        momentum = 0.999 * (1 - 0.5 * 0.96 ** (count + 1))
        product_of_momenta(optimizer).assign(product_of_momenta(optimizer) * momentum)
    before = float(product_of_momenta(optimizer))
    view.apply([tf.ones([2])], [first])
    assert float(product_of_momenta(optimizer)) == before


def test_a_view_has_the_moving_averages_of_its_server():
    optimizer, variables = built(keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5))
    view = keras_optimizers.view_for_variables(optimizer, variables[1:], [tf.constant(1), None], tf.constant(1.0))
    # Here both are on one device.
    view.apply([tf.constant([1.0])], variables[1:])
    averages = moving_averages(optimizer)
    np.testing.assert_allclose(averages[0], [0.5, 1.0])
    np.testing.assert_allclose(averages[1], [1.0])


@pytest.mark.parametrize("name", ["Adam", "Adafactor"])
def test_the_slots_of_a_variable_are_created_on_its_server(strategy, name):
    with strategy.scope():
        variables = [keras.Variable(tf.ones([4, 4])) for _ in range(5)]
        optimizer, elsewhere = (getattr(keras.optimizers, name)(0.1) for _ in range(2))
        keras_optimizers.build(optimizer, variables)
        elsewhere.build(variables)
    assert not keras_optimizers.has_strayed_slots(optimizer)
    assert keras_optimizers.has_strayed_slots(elsewhere) or name == "Adam"
    assert len({variable.value.device for variable in variables}) == 2
    assert variables_trained_by(optimizer) == variables
