"""Tests that supported uses of `jit_compile=True` work in scheduled functions, and others are refused by `schedule`."""

import numpy as np
import pytest
import tensorflow as tf

FEATURES = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


def test_compiled_functions_of_tensors_work_inside_of_a_step(strategy):
    with strategy.scope():
        kernel = tf.Variable([[1.0], [1.0]])
    square = tf.function(lambda kernel, features: tf.reduce_mean((features @ kernel) ** 2), jit_compile=True)

    @tf.function
    def step(features):
        # Gradients go through a compiled function, too.
        with tf.GradientTape() as tape:
            loss = square(tf.convert_to_tensor(kernel), features)
        kernel.assign_sub(0.5 * tape.gradient(loss, kernel))
        return loss

    assert strategy.schedule(step, args=(FEATURES,)).result() == pytest.approx((3.0**2 + 7.0**2) / 2)
    np.testing.assert_allclose(kernel, [[1 - 0.5 * 24.0], [1 - 0.5 * 34.0]])


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

    def in_condition(x):
        return tf.cond(x[0, 0] > 0, lambda: between(x), lambda: x)

    def in_a_dataset(x):
        dataset = tf.data.Dataset.from_tensor_slices(([1.0, 2.0], [3.0, 4.0]))
        return next(iter(dataset.map(lambda one, other: scaled(one + other), num_parallel_calls=2).batch(2)))

    def backwards(x):
        with tf.GradientTape() as tape:
            loss = scaled(x)
        return tape.gradient(loss, weight)

    # Not compiled, it works.
    assert strategy.schedule(tf.function(scaled.python_function), args=(FEATURES,)).result()[0, 0] == 2.0
    for step in (between, in_condition, in_a_dataset, backwards):
        with pytest.raises(ValueError, match=r"'scaled'.*variable 'weight:0' on /job:ps.*pass its value") as raised:
            strategy.schedule(tf.function(step), args=(FEATURES,))
        assert step.__name__ in str(raised.value)
    # The check does not change a function: it may be scheduled, and called by another one.
    plain = tf.function(lambda x: x * weight)
    assert strategy.schedule(plain, args=(tf.constant(2.0),)).result() == 4.0
    assert strategy.schedule(tf.function(lambda x: plain(plain(x))), args=(tf.constant(2.0),)).result() == 8.0
