"""Tests that custom gradients go with the graph of their function, and are there as long as it is."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.framework import ops

from coordinator.ps_strategy.tensorflow_internals.functions import custom_gradients_freed


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    with custom_gradients_freed():
        yield


def registered() -> set[str]:
    for _ in range(3):
        gc.collect()
    return set(ops.gradient_registry.list())


@tf.custom_gradient
def doubled(x: Any) -> Any:
    """Returns its argument, with twice the gradient."""
    return tf.identity(x), lambda change: 2.0 * change


def function_of(variable: tf.Variable, times: int = 1) -> Any:
    inner = tf.function(lambda x: doubled(x) * tf.nn.silu(tf.ones([])))

    @tf.function
    def outer(x: Any) -> Any:
        for _ in range(times):
            x = tf.cond(x > 0.0, lambda x=x: doubled(x), lambda x=x: x)
        return inner(x) * variable

    return outer


def gradient_of(function: Any, x: tf.Variable) -> float:
    with tf.GradientTape() as tape:
        y = function(x)
    return float(tape.gradient(y, x))


def test_gradients_are_computed_as_long_as_the_function_lives() -> None:
    x = tf.Variable(1.0)
    function = function_of(tf.Variable(3.0))
    function(x)
    # What is traced later, and after a garbage collection, finds them, too.
    registered()
    later = tf.function(lambda x: gradient_of_symbolic(function, x))
    expected = 2.0 * 2.0 * 3.0 * float(tf.nn.silu(1.0))
    assert gradient_of(function, x) == pytest.approx(expected)
    assert float(later(x)) == pytest.approx(expected)


def gradient_of_symbolic(function: Any, x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return tape.gradient(y, x)


def test_the_gradients_of_a_function_go_with_it_and_so_do_the_handles_it_captured() -> None:
    before = registered()
    variable, x = tf.Variable(3.0), tf.Variable(1.0)
    handle = weakref.ref(variable.handle)
    function = function_of(variable, times=2)
    gradient_of(function, x)
    assert len(registered() - before) >= 3
    del function, variable
    assert registered() <= before
    assert handle() is None


def test_the_gradient_of_a_graph_that_is_no_functions_stays() -> None:
    before = registered()
    with tf.Graph().as_default():
        y = doubled(x := tf.constant(1.0))
        # Nothing but the registry has it.
        assert len(registered() - before) == 1
        assert tf.gradients(y, x)[0] is not None
