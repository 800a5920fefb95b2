"""Tests of TensorFlow's private interfaces that change graphs."""

import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.functions import (
    CancellationManager,
    built_function,
    call_concrete,
    replace_input,
    under_another_name,
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
        assert [each.type for each in read.control_inputs] == ["AssignAddVariableOp"], "control dependencies are kept"
        [added] = [each for each in graph.get_operations() if each.type.startswith("Add")]
        with graph.as_default():
            replace_input(added, 1, added.inputs[1] * 100)

    signature = [tf.TensorSpec([], tf.resource), tf.TensorSpec([], tf.int32)]
    function = built_function(body, signature, change)
    manager = CancellationManager()
    [found] = call_concrete(function, [variable.handle, tf.constant(3)], manager)
    assert found.numpy() == 4 + 300
    assert variable.numpy() == 4


def test_a_function_under_another_name_has_the_same_graph():
    @tf.function(autograph=False, experimental_attributes={"api_implements": "addition"})
    def add(x, y):
        return {"sum": x + y}

    concrete = add.get_concrete_function(tf.constant(1), tf.constant(2))
    other = under_another_name(concrete)
    assert other.name != concrete.name
    assert other.function_def.attr["api_implements"].s == b"addition"
    found = call_concrete(other, [tf.constant(3), tf.constant(4)], CancellationManager())
    assert found["sum"].numpy() == 7
    del other
    assert add(tf.constant(5), tf.constant(6))["sum"].numpy() == 11
