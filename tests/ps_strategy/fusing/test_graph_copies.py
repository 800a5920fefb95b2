"""Tests that copies of a function's graph in another graph do the same as consecutive calls of the function."""

import tensorflow as tf

from coordinator.ps_strategy.fusing.repeated_function import RepeatedFunction
from tests.ps_strategy.tensorflow_internals.private_names import call_flat


def run(fn, *steps):
    """Runs a `tf.function` with the arguments of each step in one call, and returns a list for each step."""
    concrete = fn.get_concrete_function(*[tf.TensorSpec.from_tensor(tf.constant(value)) for value in steps[0]])
    repeated = RepeatedFunction(concrete, len(steps), [False] * len(steps[0]))
    inputs = [tf.stack(values) for values in zip(*steps, strict=True)]
    outputs = repeated.call_on(inputs, concrete.captured_inputs, tf.constant(True), call_flat)
    return [list(step) for step in zip(*outputs, strict=True)]


def test_steps_use_a_variable_one_after_the_other():
    variable = tf.Variable(1.0)

    @tf.function
    def fn(x):
        with tf.compat.v1.colocate_with(variable.handle):
            before = variable.read_value()
        with tf.control_dependencies([before * 3]):
            variable.assign(before * 2 + x)
        return before, variable.read_value()

    assert run(fn, [1.0], [10.0], [100.0]) == [[1, 3], [3, 16], [16, 132]]
    assert variable.numpy() == 132


def test_functions_branches_and_loops_are_copied_as_well():
    variable = tf.Variable(0)

    @tf.function
    def twice(x):
        variable.assign_add(1)
        return 2 * x

    @tf.function
    def fn(x):
        y = twice(x)
        if x > 1:
            y += 100
        while y < 40:
            y = twice(y)
        return tf.map_fn(lambda z: z + y, tf.range(2))

    found = run(fn, [1], [2], [3])
    assert [list(each) for (each,) in found] == [[64, 65], [104, 105], [106, 107]]
    assert variable.numpy() == 8


def test_an_argument_may_be_returned_and_be_a_control_dependency():
    @tf.function
    def fn(x, y):
        with tf.control_dependencies([x]):
            return x, y + 1, tf.constant(3)

    assert run(fn, [1, 2], [3, 4]) == [[1, 3, 3], [3, 5, 3]]
