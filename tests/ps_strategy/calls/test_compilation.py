"""Functions that XLA is to compile are found wherever an operation calls them with a remote resource."""

import pytest
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.functions import compiled_calls
from coordinator.ps_strategy.tensorflow_internals.handles import owner_of_handle


def is_resource(captured):
    return captured.dtype == tf.resource


def dataset():
    return tf.data.Dataset.from_tensor_slices(([1.0, 2.0], [3, 4]))


def single(x):
    return tf.data.Dataset.from_tensors(x)


def to_key(x):
    return tf.cast(x, tf.int64)


# `f` is the compiled function of one number; its caller has arguments, elements and states besides its captures.
CALLS = {
    "map": lambda f: dataset().map(lambda x, y: (y, f(x))),
    "parallel map": lambda f: dataset().map(lambda x, y: f(x), num_parallel_calls=2).batch(2),
    "parallel interleave": lambda f: dataset().interleave(lambda x, y: single(f(x)), num_parallel_calls=2),
    "scan": lambda f: dataset().scan((0.0, 0), lambda state, each: (state, f(each[0]))),
    "key of a group": lambda f: dataset().group_by_window(lambda x, y: to_key(f(x)), lambda k, each: each, 2),
    "reduced group": lambda f: dataset().group_by_window(
        lambda x, y: to_key(x), lambda k, each: each.map(lambda x, y: f(x)), 2
    ),
    "tf.map_fn": lambda f: tf.map_fn(f, tf.constant([1.0, 2.0])),
    "tf.cond": lambda f: tf.cond(tf.random.uniform([]) > 0.5, lambda: f(1.0), lambda: 0.0),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_compiled_function_is_found_with_its_remote_resource(case):
    other, variable = tf.Variable(1.0), tf.Variable(2.0)
    compiled = tf.function(lambda x: x * variable, jit_compile=True)
    plain = tf.function(lambda x: x * variable)

    def calling(f):
        # The first capture must not be mistaken for that of the compiled function.
        return tf.function(lambda: CALLS[case](lambda x: f(x * other)), autograph=False).get_concrete_function()

    found = list(compiled_calls(calling(compiled), is_resource))
    assert found
    assert all(owner_of_handle(captured) is variable for _, captured in found)
    assert not list(compiled_calls(calling(plain), is_resource))


def test_an_operation_with_an_unknown_way_of_calling_functions_is_ignored():
    variable = tf.Variable(2.0)
    body = tf.function(lambda index, x: x * variable).get_concrete_function(tf.constant(0), tf.constant(1.0))

    @tf.function
    def step():
        return tf.raw_ops.For(start=0, limit=3, delta=1, input=[tf.constant(1.0), variable.handle], body=body)

    assert not list(compiled_calls(step.get_concrete_function(), is_resource))
