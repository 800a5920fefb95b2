"""Tests that supported uses of `jit_compile=True` work in scheduled functions, and others are refused by `schedule`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

FEATURES = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


@tf.function(jit_compile=True)
def loss_and_gradients(kernel, bias, features):
    with tf.GradientTape() as tape:
        tape.watch([kernel, bias])
        loss = tf.reduce_mean((features @ kernel + bias) ** 2)
    return loss, *tape.gradient(loss, [kernel, bias])


def test_compiled_functions_of_tensors_work_inside_of_a_step(strategy):
    with strategy.scope():
        layer = keras.layers.Dense(1, kernel_initializer="ones")
        layer.build((None, 2))
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build(layer.trainable_variables)

    @tf.function(jit_compile=True)
    def softmax(x):
        return tf.nn.softmax(x, axis=0)

    @tf.function
    def step(features):
        loss, *gradients = loss_and_gradients(*map(tf.convert_to_tensor, layer.trainable_variables), features)
        optimizer.apply(gradients, layer.trainable_variables)
        # Gradients go through a compiled function, too.
        with tf.GradientTape() as tape:
            weights = tf.reduce_sum(softmax(layer(features)) ** 2)
        return loss, tape.gradient(weights, layer.trainable_variables[0])

    loss, gradient = strategy.schedule(step, args=(FEATURES,)).result()
    assert loss == pytest.approx((3.0**2 + 7.0**2) / 2)
    np.testing.assert_allclose(layer.kernel, [[1 - 0.5 * 24.0], [1 - 0.5 * 34.0]])
    assert gradient.shape == (2, 1)


def test_a_model_that_was_compiled_with_jit_compile_is_called_in_a_step(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile("sgd", "mse", jit_compile=True)
    found = strategy.schedule(tf.function(model), args=(FEATURES,)).result()
    np.testing.assert_allclose(found, [[3.0], [7.0]])


def test_a_scheduled_function_is_not_compiled_as_a_whole(strategy):
    whole = tf.function(lambda x: x + 1.0, jit_compile=True)
    for function in (whole, whole.get_concrete_function(FEATURES)):
        with pytest.raises(ValueError, match=r"(?s)was scheduled and has jit_compile=True.*Leave jit_compile"):
            strategy.schedule(function, args=(FEATURES,))
    assert strategy.done()


def test_a_compiled_function_that_uses_a_variable_on_a_server_raises_wherever_called(strategy):
    with strategy.scope():
        weight = tf.Variable(2.0, name="weight")

    @tf.function(jit_compile=True)
    def scaled(x):
        return x * weight

    def between(x):
        return tf.function(scaled)(x)

    def in_loop(x):
        for _ in tf.range(2):
            x = scaled(x)
        return x

    def in_branch(x):
        return tf.switch_case(tf.cast(x[0, 0], tf.int32), [lambda: x, lambda: scaled(x)])

    def in_condition(x):
        return tf.cond(x[0, 0] > 0, lambda: between(x), lambda: x)

    def backwards(x):
        with tf.GradientTape() as tape:
            loss = scaled(x)
        return tape.gradient(loss, weight)

    for step in (scaled.python_function, between, in_loop, in_branch, in_condition, backwards):
        if step is scaled.python_function:
            # Not compiled, it works.
            assert strategy.schedule(tf.function(step), args=(FEATURES,)).result()[0, 0] == 2.0
            continue
        with pytest.raises(ValueError, match=r"'scaled'.*variable 'weight:0' on /job:ps.*pass its value") as raised:
            strategy.schedule(tf.function(step), args=(FEATURES,))
        assert step.__name__ in str(raised.value)


def test_a_function_that_was_scheduled_may_be_called_by_another_one(strategy):
    with strategy.scope():
        weight = tf.Variable(3.0)

    @tf.function
    def scaled(x):
        return x * weight

    assert strategy.schedule(scaled, args=(tf.constant(2.0),)).result() == 6.0
    # The check must not have changed the function.
    twice = tf.function(lambda x: scaled(scaled(x)))
    assert strategy.schedule(twice, args=(tf.constant(2.0),)).result() == 18.0
