"""Tests that custom gradients go with the graph of their function, and are there as long as it is."""

import functools
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


def gradient_of(function: Any, x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return tape.gradient(y, x)


def function_of(variable: tf.Variable) -> Any:
    inner = tf.function(lambda x: doubled(x) * tf.nn.silu(tf.ones([])))
    return tf.function(lambda x: inner(tf.cond(x > 0.0, lambda: doubled(x), lambda: x)) * variable)


def test_gradients_are_computed_as_long_as_the_function_lives_and_then_freed() -> None:
    before = registered()
    variable, x = tf.Variable(3.0), tf.constant(1.0)
    handle = weakref.ref(variable.handle)
    function = function_of(variable)
    function(x)
    # What is traced later, and after a garbage collection, finds them, too.
    assert len(registered() - before) >= 3
    later = tf.function(functools.partial(gradient_of, function))
    expected = 2.0 * 2.0 * 3.0 * float(tf.nn.silu(1.0))
    assert [float(gradient_of(function, x)), float(later(x))] == pytest.approx([expected] * 2)
    del function, later, variable
    assert registered() <= before
    assert handle() is None


def test_the_gradient_of_a_graph_that_is_no_functions_stays() -> None:
    before = registered()
    with tf.Graph().as_default():
        y = doubled(x := tf.constant(1.0))
        # Nothing but the registry has it.
        assert len(registered() - before) == 1
        assert tf.gradients(y, x)[0] is not None
