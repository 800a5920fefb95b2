"""Tests that a function reads a shared scalar once, and again only where its program requires that."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.shared_variable import make_shared
from tests.ps_strategy.every_worker import concrete_function
from tests.ps_strategy.tensorflow_internals.private_names import function_in, rate_variable

TIMEOUT = 120.0


def shared(value):
    variable = tf.Variable(value, trainable=False)
    make_shared(variable)
    return variable


def reads_of(concrete, variable):
    """Returns how many operations of a function, its branches and loops included, read a variable."""
    return _reads_in(concrete.graph, variable.handle)


def _reads_in(graph, handle):
    inside = next((inside for outside, inside in graph.captures if outside is handle), None)
    own = [] if inside is None else [each for each in inside.consumers() if each.type == "ReadVariableOp"]
    parts = {
        str(each.get_attr(name).name)
        for each in graph.get_operations()
        for name in ("then_branch", "else_branch", "body", "cond")
        if each.type in ("If", "StatelessIf", "While", "StatelessWhile") and name in each.node_def.attr
    }
    return len(own) + sum(_reads_in(function_in(graph, part).graph, handle) for part in parts)


def after(_, variable):
    return [variable * 2.0, variable * 3.0]


def waited(variable):
    with tf.control_dependencies([tf.random.normal([])]):
        return variable + 0.0


def counted_in_a_loop(variable):
    total = tf.constant(0.0)
    for _ in tf.range(3):
        total += variable
        variable.assign_add(1.0)
    return total


def watched(variable):
    before = variable + 0.0
    with tf.GradientTape() as tape:
        tape.watch(variable)
        y = variable * variable
    return before + tape.gradient(y, variable)


CASES = {
    "used twice": (lambda v: [v + 1.0, v * 2.0, tf.cast(v, tf.float64)], 1, [11.0, 20.0, 10.0]),
    "assigned in between": (lambda v: [v + 1.0, *after(v.assign(3.0), v)], 2, [11.0, 6.0, 9.0]),
    "added to": (lambda v: [*after(v.assign(v + 1.0), v), *after(v.assign(v + 1.0), v)], 3, [22.0, 33.0, 24.0, 36.0]),
    "read on purpose": (lambda v: [v + 1.0, v.read_value(), v.read_value()], 3, [11.0, 10.0, 10.0]),
    "after a wait": (lambda v: [v + 1.0, waited(v)], 2, [11.0, 10.0]),
    "in a branch": (lambda v: [v + 1.0, tf.cond(v > 0.0, lambda: v * 2.0, lambda: v * 3.0)], 1, [11.0, 20.0]),
    "first in a branch": (lambda v: [tf.cond(tf.timestamp() > 0.0, lambda: 2.0 * (v + 1.0), lambda: v)], 2, [22.0]),
    # The result of an assignment is one more read.
    "assigned in a branch": (
        lambda v: [tf.cond(v > 0.0, lambda: [v.assign(2.0), v + 1.0][1], lambda: v + 0.0), v + 0.0],
        3,
        [3.0, 2.0],
    ),
    "in a loop": (lambda v: [v + 1.0, counted_in_a_loop(v), v + 0.0], 3, [11.0, 33.0, 13.0]),
    # Whatever a nested function does to it.
    "after a function": (lambda v: [v + 1.0, tf.function(lambda: v.assign_add(1.0))(), v + 0.0][::2], 2, [11.0, 11.0]),
    "watched by a tape": (lambda v: [watched(v)], 3, [30.0]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_scalar_is_read_as_often_as_needed_and_its_value_is_right(name):
    use, reads, expected = CASES[name]
    variable = shared(10.0)
    function = tf.function(lambda: use(variable))
    concrete = function.get_concrete_function()
    assert [float(each) for each in function()] == expected
    assert reads_of(concrete, variable) == reads


def test_trainable_variables_and_non_scalars_are_read_at_each_use():
    for variable in (tf.Variable(2.0), tf.Variable([2.0, 3.0], trainable=False)):
        make_shared(variable)
        concrete = tf.function(functools.partial(after, None, variable)).get_concrete_function()
        assert reads_of(concrete, variable) == 2


def test_adam_reads_iterations_and_learning_rate_once_per_step(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(7))])
        optimizer = keras.optimizers.Adam(0.5)
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    concrete = concrete_function(strategy, step, tf.ones([2, 4]))
    assert [reads_of(concrete, each.value) for each in (optimizer.iterations, rate_variable(optimizer))] == [1, 1]
    # Read once in each call, not only in the first.
    for rate in (0.0, 0.1):
        before = model.get_weights()[0]
        optimizer.learning_rate = rate
        strategy.schedule(step, args=(tf.ones([2, 4]),)).result(TIMEOUT)
        assert np.array_equal(model.get_weights()[0], before) == (rate == 0.0)
