"""Tests that transferred tensors arrive unchanged, in few messages of a known size."""

import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.fusing.message_packing import MAX_PACKED_BYTES
from coordinator.updates.model import transfer


def sent(tensors, signature=None):
    """Transfers tensors in a function; returns the received tensors, the size in bytes, and the function's graph."""
    signature = signature or [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]

    @tf.function(autograph=False)
    def there(*given):
        arrived, size = transfer(given, "/device:CPU:0", None)
        for received, sent_tensor in zip(arrived, given, strict=True):
            assert received.dtype == sent_tensor.dtype
            assert received.shape.is_compatible_with(sent_tensor.shape)
            assert received.shape.rank == sent_tensor.shape.rank
        return arrived, size

    concrete = there.get_concrete_function(*signature)
    arrived, size = concrete(*tensors)
    assert size.dtype == tf.int64
    return arrived, int(size), concrete.graph


def messages(graph):
    """Returns the dtypes of the messages with several tensors."""
    return sorted(each.outputs[0].dtype.name for each in graph.get_operations() if each.type == "SplitV")


def assert_same(arrived, tensors):
    for received, sent_tensor in zip(arrived, tensors, strict=True):
        np.testing.assert_array_equal(received, sent_tensor)


def test_tensors_of_one_dtype_are_sent_in_one_message():
    tensors = [
        tf.constant([[1.0, 2.0], [3.0, 4.0]]),
        tf.constant([1, 2, 3], tf.int64),
        tf.constant(5.0),
        tf.constant([True, False]),
        tf.constant([[7], [8]], tf.int64),
        tf.constant([0.5, 1.5], tf.bfloat16),
        tf.zeros([2, 3, 1]),
    ]
    arrived, size, graph = sent(tensors)
    assert_same(arrived, tensors)
    assert size == 4 * (4 + 1 + 6) + 8 * (3 + 2) + 2 + 2 * 2
    assert messages(graph) == ["float32", "int64"]


def test_the_first_dimension_may_be_unknown():
    signature = [tf.TensorSpec([None, 3]), tf.TensorSpec([2]), tf.TensorSpec([None]), tf.TensorSpec([])]
    for rows in (0, 1, 5):
        tensors = [tf.ones([rows, 3]), tf.range(2.0), tf.fill([rows], 2.0), tf.constant(4.0)]
        arrived, size, graph = sent(tensors, signature)
        assert_same(arrived, tensors)
        assert size == 4 * (3 * rows + 2 + rows + 1)
        # With a header of integers.
        assert messages(graph) == ["int32"]


def test_what_is_large_or_of_unknown_shape_and_strings_are_sent_separately():
    largest = tf.range(MAX_PACKED_BYTES // 4, dtype=tf.float32)
    tensors = [
        tf.ones([2, 3]),
        tf.constant(["a", "bc"]),
        tf.range(MAX_PACKED_BYTES // 4 + 1, dtype=tf.float32),
        tf.ones([3]),
        largest,
        tf.zeros([0]),
        tf.zeros([3, 0]),
        tf.constant(2.0),
    ]
    signature = [tf.TensorSpec(None), *(tf.TensorSpec(each.shape, each.dtype) for each in tensors[1:])]
    arrived, size, graph = sent(tensors, signature)
    assert_same(arrived, tensors)
    assert size == 4 * (6 + MAX_PACKED_BYTES // 4 + 1 + 3 + MAX_PACKED_BYTES // 4 + 1)
    [packed] = [each for each in graph.get_operations() if each.type == "ConcatV2"]
    assert packed.outputs[0].shape == [3 + MAX_PACKED_BYTES // 4 + 1]
    assert transfer([], None, None)[1] == 0
