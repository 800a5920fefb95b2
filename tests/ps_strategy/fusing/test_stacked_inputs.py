"""Tests of the inputs of fused calls, as the binding of each step gives them."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.fusing.repeated_function import StackedInputs
from coordinator.ps_strategy.tensorflow_internals.functions import flat_inputs

SHARED = tf.constant(7)
RESULTS = {
    "arrays": ([np.array([1, 2]), SHARED], [np.array([3, 4]), SHARED]),
    "numbers": ([np.float32(1), SHARED], [np.float32(2), SHARED]),
    "tensors": ([tf.constant("a"), SHARED], [tf.constant("b"), SHARED]),
    "two that differ": ([np.zeros([2, 3], bool), np.int8(1)], [np.ones([2, 3], bool), np.int8(2)]),
    "nothing that differs": ([SHARED, SHARED], [SHARED, SHARED]),
}


def bound_with(concrete, flat):
    return flat_inputs(concrete, flat, {})


def concrete_of(steps, *signature):
    function = tf.function(lambda *args: args)
    return function.get_concrete_function(*(signature or map(tf.constant, steps[0])))


@pytest.mark.parametrize("steps", RESULTS.values(), ids=RESULTS)
def test_arguments_that_are_bound_once_are_those_that_are_bound_for_each_step(steps):
    concrete, calls = concrete_of(steps), []

    def bind(flat):
        calls.append(flat)
        return bound_with(concrete, flat)

    found = StackedInputs.of_arguments(steps, bind)
    expected = StackedInputs.of_steps([bound_with(concrete, step) for step in steps])
    assert len(calls) == 1
    assert found is not None
    assert (found.length, found.is_shared) == (expected.length, expected.is_shared)
    for one, is_one, other in zip(found.values, found.is_shared, expected.values, strict=True):
        assert is_one is (one is SHARED)
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


def test_other_arguments_are_bound_for_each_step():
    others = [("a", "b"), (1.0, 2.0), (np.int32(1), np.int64(2)), (np.zeros(1, ">i4"), np.ones(1, ">i4"))]
    for one, other in [(np.array("a"), np.array("b")), *others]:
        assert StackedInputs.of_arguments([[one], [other]], list) is None, one
    # Arrays that the function converts, and one tensor in two places.
    steps = [[np.float64(1)], [np.float64(2)]]
    concrete = concrete_of(steps, tf.TensorSpec([], tf.float32))
    assert StackedInputs.of_arguments(steps, lambda flat: bound_with(concrete, flat)) is None
    assert StackedInputs.of_steps([bound_with(concrete, step) for step in steps]).values[0].dtype == tf.float32
    one, other = tf.constant(1), tf.constant(2)
    concrete = concrete_of([[one, one]])
    assert StackedInputs.of_arguments([[one, one], [other, other]], lambda flat: bound_with(concrete, flat)) is None
