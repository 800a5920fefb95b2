"""Tests that a function that disables fusing is recognized, wherever the call is nested."""

import tensorflow as tf

from coordinator.ps_strategy.fusing.repeated_function import disable_fusing, may_be_fused


def unfusable():
    disable_fusing()
    return tf.constant(1.0)


def test_disabled_fusing_is_found_in_a_function_and_in_nested_functions():
    inner = tf.function(unfusable)
    inner()

    def in_a_branch(x):
        return tf.cond(x > 0, inner, lambda: tf.constant(0.0))

    def in_a_loop(x):
        return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y + in_a_branch(x)), (0, x))[1]

    for function in (lambda _: unfusable(), lambda _: inner(), in_a_branch, in_a_loop, tf.function(in_a_loop)):
        assert not may_be_fused(tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec([])))
    assert may_be_fused(tf.function(lambda x: x + 1).get_concrete_function(tf.TensorSpec([])))
