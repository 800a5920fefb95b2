"""Tests that TensorFlow's private interfaces for nested calls exist and mean what the library assumes."""

import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.functions import named_arguments, structure_outputs
from coordinator.ps_strategy.tensorflow_internals.handles import copy_handle_data


def test_a_placeholder_gets_the_handle_data_of_another():
    variable, other = tf.Variable([1.0]), tf.Variable([10.0])
    concrete = tf.function(lambda: variable.assign_add([2.0])).get_concrete_function()

    @tf.function(input_signature=[tf.TensorSpec([], tf.resource)], autograph=False)
    def read(handle):
        copy_handle_data(concrete.inputs[0], handle)
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
        assert value.shape == [1]
        return value

    assert read(other.handle).numpy() == [10.0]


def test_outputs_have_the_structure_that_the_function_returned():
    @tf.function
    def plain(x):
        return {"twice": 2 * x, "none": None, "pair": (x, [tf.constant("a")])}

    concrete = plain.get_concrete_function(tf.TensorSpec([2]))
    values = [
        np.full(output.shape, number, output.dtype.as_numpy_dtype) for number, output in enumerate(concrete.outputs)
    ]
    packed = structure_outputs(concrete, values)
    assert packed["none"] is None
    assert {id(value) for value in tf.nest.flatten(packed) if value is not None} == set(map(id, values))

    @tf.function
    def ragged(x):
        return x, tf.RaggedTensor.from_row_lengths(x, [1, 1])

    concrete = ragged.get_concrete_function(tf.TensorSpec([2]))
    values = [output.numpy() for output in tf.nest.flatten(ragged(tf.constant([5.0, 6.0])), expand_composites=True)]
    _, rows = structure_outputs(concrete, values)
    assert rows.to_list() == [[5.0], [6.0]]


def test_arguments_are_found_by_the_names_of_their_parameters():
    class Model:
        @tf.function
        def step(self, x, *others, rate=1.0, **options):
            return x

    found = named_arguments(Model().step, (1, 2, 3), {"rate": 4, "flag": True})
    assert found == {"x": 1, "others": (2, 3), "rate": 4, "options": {"flag": True}}
