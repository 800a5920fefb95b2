"""A function that must run alone is known by its mark, wherever in it that is."""

import tensorflow as tf

from coordinator.ps_strategy.lone_functions import is_lone, mark_as_lone


def lone():
    mark_as_lone()
    return tf.constant(1.0)


def test_a_mark_is_found_in_the_function_and_in_whatever_it_calls():
    inner = tf.function(lone)
    inner()

    def in_a_branch(x):
        return tf.cond(x > 0, inner, lambda: tf.constant(0.0))

    def in_a_loop(x):
        return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y + in_a_branch(x)), (0, x))[1]

    for marked in (lambda _: lone(), lambda _: inner(), in_a_branch, in_a_loop, tf.function(in_a_loop)):
        assert is_lone(tf.function(marked, autograph=False).get_concrete_function(tf.TensorSpec([])))


def test_a_function_without_a_mark_is_not_lone():
    assert not is_lone(tf.function(lambda x: x + 1).get_concrete_function(tf.TensorSpec([])))
