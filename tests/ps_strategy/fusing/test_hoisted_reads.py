"""Tests that a step reads a variable once, although loops, branches and functions use it, with the same results."""

import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.fusing.graph_copies import packed_function
from tests.ps_strategy.tensorflow_internals.private_names import call_flat


def reads(concrete):
    """Returns how many reads of variables a function has itself, and how many the functions have that it calls."""
    graph = concrete.graph.as_graph_def()
    inner = [node for function in graph.library.function for node in function.node_def]
    return tuple(sum(node.op == "ReadVariableOp" for node in nodes) for nodes in (graph.node, inner))


def hoisted(fn, *args):
    """Runs a function as it is and with hoisted reads, on equal variables, and returns the latter function.

    Results and variables must be equal.
    """
    concrete = fn.get_concrete_function(*args)
    copy = packed_function(concrete) or concrete
    variables = concrete.variables
    before = [variable.numpy() for variable in variables]
    outcomes = []
    for each in (concrete, copy):
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        go = [] if each is concrete else [tf.constant(True)]
        found = call_flat(each, [*args, *concrete.captured_inputs, *go])
        outcomes.append([*(value.numpy() for value in tf.nest.flatten(found)), *(each.numpy() for each in variables)])
    for expected, result in zip(*outcomes, strict=True):
        np.testing.assert_array_equal(expected, result)
    return copy


def test_a_loop_a_branch_a_map_and_a_function_share_one_read():
    weights = tf.Variable([[1.0, 2.0], [3.0, 4.0]])

    @tf.function
    def function(x):
        return x @ weights

    @tf.function
    def step(x):
        for _ in tf.range(3):
            if tf.reduce_sum(x) > 0:
                x = function(x) / 10
        x = tf.cond(x[0, 0] > 0, lambda: x + weights, lambda: x)
        return tf.map_fn(lambda row: row * weights[0], x) + weights

    assert reads(hoisted(step, tf.ones([2, 2]))) == (1, 0)


def test_a_read_sees_the_changes_before_the_loop_and_none_after_it():
    weight = tf.Variable([2.0])

    @tf.function
    def repeated(x):
        for _ in tf.range(3):
            x = x * weight
        return x

    @tf.function
    def step(x):
        x = repeated(x)
        weight.assign_add([1.0])
        x = repeated(x)
        weight.assign(x / 100)
        return repeated(x), weight + 1.0

    assert reads(hoisted(step, tf.ones([1]))) == (4, 0)


def changed_in_a_function_after_its_loop(weight, _, x):
    @tf.function
    def function(x):
        for _ in tf.range(3):
            x = x * weight
        weight.assign(x)
        return x

    return function(x) + function(x)


def changed_in_the_loop(weight, _, x):
    for _ in tf.range(3):
        x = x * weight
        weight.assign_add([1.0])
    return x


def given_twice(weight, _, x):
    @tf.function
    def change(given):
        given.assign_add([1.0])
        return weight + 1.0

    return x + change(weight)


def rows_looked_up(_, table, x):
    for number in tf.range(3):
        x = x + table.sparse_read(number) + table[0]
    return x


def test_a_variable_that_may_change_meanwhile_is_read_where_it_was():
    weight, table = tf.Variable([2.0]), tf.Variable([[1.0], [2.0], [3.0]])
    for step in (changed_in_a_function_after_its_loop, changed_in_the_loop, given_twice, rows_looked_up):
        function = tf.function(lambda x, step=step: step(weight, table, x))
        assert reads(hoisted(function, tf.ones([1]))) == (0, 1), step.__name__


def test_a_loop_that_waits_for_a_variable_reads_it_in_each_iteration():
    clocks, flag, weights = tf.Variable([5.0, 6.0]), tf.Variable(1), tf.Variable([0.5, 0.25])

    @tf.function
    def waiting(x):
        while tf.reduce_min(clocks) < x:
            x -= 1.0
        go_on = tf.constant(True)
        while go_on:
            x, last = x + 1.0, tf.identity(flag)
            go_on = last < 1
        return x

    @tf.function
    def decided_by_weights(x):
        while tf.reduce_sum(x) > 1.0:
            x = x * weights
        return x

    assert reads(hoisted(waiting, tf.constant(9.0))) == (0, 2)
    assert reads(hoisted(decided_by_weights, tf.constant([9.0, 9.0]))) == (1, 0)
