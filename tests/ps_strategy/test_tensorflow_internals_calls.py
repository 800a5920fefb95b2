"""Each private use of TensorFlow for calls inside of calls still is, and means, what the library takes it for."""

import numpy as np
import tensorflow as tf

from coordinator.ps_strategy import tensorflow_internals


def test_a_call_is_added_to_a_graph_with_inputs_in_place_of_the_captures():
    variable, other = tf.Variable(1.0), tf.Variable(10.0)

    @tf.function
    def add_to_variable(x):
        return {"sum": variable.assign_add(x), "none": None}

    concrete = add_to_variable.get_concrete_function(tf.TensorSpec([]))
    added = []

    @tf.function(input_signature=[tf.TensorSpec([]), tf.TensorSpec([], tf.resource)], autograph=False)
    def twice(x, handle):
        tensorflow_internals.copy_handle_data(concrete.inputs[1], handle)
        earlier, outputs = (), []
        for _ in range(2):
            with tf.control_dependencies(earlier):
                found, earlier = tensorflow_internals.call_in_graph(concrete, [x, handle])
            added.append(len(earlier))
            outputs += found
        return outputs

    whole = twice.get_concrete_function()
    assert [float(total) for total in whole(tf.constant(2.0), other.handle)] == [12.0, 14.0]
    assert (variable.numpy(), other.numpy()) == (1.0, 14.0)
    assert min(added) >= 1
    assert whole.captured_inputs == []


def test_outputs_are_packed_as_the_function_returned_them():
    @tf.function
    def plain(x):
        return {"twice": 2 * x, "none": None, "pair": (x, [tf.constant("a")])}

    concrete = plain.get_concrete_function(tf.TensorSpec([2]))
    values = [
        np.full(output.shape, number, output.dtype.as_numpy_dtype) for number, output in enumerate(concrete.outputs)
    ]
    packed = tensorflow_internals.packed_outputs(concrete, values)
    assert packed["none"] is None
    assert {id(value) for value in tf.nest.flatten(packed) if value is not None} == set(map(id, values))

    @tf.function
    def ragged(x):
        return x, tf.RaggedTensor.from_row_lengths(x, [1, 1])

    concrete = ragged.get_concrete_function(tf.TensorSpec([2]))
    values = [output.numpy() for output in tf.nest.flatten(ragged(tf.constant([5.0, 6.0])), expand_composites=True)]
    _, rows = tensorflow_internals.packed_outputs(concrete, values)
    assert rows.to_list() == [[5.0], [6.0]]
