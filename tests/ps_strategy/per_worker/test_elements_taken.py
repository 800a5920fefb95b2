"""Tests of how many elements of its iterators a function is known to take."""

import math

import tensorflow as tf

from coordinator.ps_strategy.per_worker.dataset import elements_per_call

SPEC = tf.data.IteratorSpec(tf.TensorSpec([], tf.int64))


def one(iterator):
    return next(iterator)


def three(iterator):
    return [next(iterator) for _ in range(3)]


def optional(iterator):
    return iterator.get_next_as_optional().has_value()


def in_a_function(iterator):
    return [*tf.function(three)(iterator), tf.function(one)(iterator)]


def in_a_branch(iterator):
    return next(iterator) if tf.random.uniform([]) > 0.5 else tf.constant(0, tf.int64)


def in_a_loop(iterator):
    total = tf.constant(0, tf.int64)
    for _ in tf.range(3):
        total += next(iterator)
    return total


def until_the_end(iterator):
    total = tf.constant(0, tf.int64)
    for number in iterator:
        total += number
    return total


def test_elements_are_counted_where_each_call_takes_the_same_number():
    counts = {one: 1, three: 3, optional: 1, in_a_function: 4, (lambda iterator: tf.constant(0)): 0}
    counts |= dict.fromkeys([in_a_branch, in_a_loop, until_the_end], math.inf)
    for function, count in counts.items():
        assert elements_per_call(tf.function(function).get_concrete_function(SPEC)) == count, function


def test_with_several_iterators_it_is_the_largest_number():
    def both(first, others, variable):
        for _ in tf.range(2):
            variable.assign_add(1)
        return next(first), next(others["x"]), next(others["x"])

    # Variables among the arguments do not matter.
    concrete = tf.function(both).get_concrete_function(SPEC, {"x": SPEC}, tf.Variable(0))
    assert elements_per_call(concrete) == 2
