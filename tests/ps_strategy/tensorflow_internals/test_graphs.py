"""Tests of TensorFlow's private interfaces that change graphs."""

import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.functions import (
    CancellationManager,
    built_function,
    call_concrete,
    replace_input,
)
from coordinator.ps_strategy.tensorflow_internals.handles import copy_handle_data


def test_a_graph_may_be_changed_before_it_becomes_a_function():
    variable = tf.Variable(1)

    def body(handle, x):
        copy_handle_data(variable.handle, handle)
        tf.raw_ops.AssignAddVariableOp(resource=handle, value=x)
        return [tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int32) + x]

    def change(graph):
        [read] = [each for each in graph.get_operations() if each.type == "ReadVariableOp"]
        assert read.outputs[0].shape == []
        assert [each.type for each in read.control_inputs] == ["AssignAddVariableOp"], "control dependencies are kept"
        [added] = [each for each in graph.get_operations() if each.type.startswith("Add")]
        with graph.as_default():
            replace_input(added, 1, added.inputs[1] * 100)

    function = built_function(body, [tf.TensorSpec([], tf.resource), tf.TensorSpec([], tf.int32)], change)
    [found] = call_concrete(function, [variable.handle, tf.constant(3)], CancellationManager())
    assert (found.numpy(), variable.numpy()) == (4 + 300, 4)
