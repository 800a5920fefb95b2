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
