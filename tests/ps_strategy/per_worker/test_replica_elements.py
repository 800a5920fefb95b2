"""Datasets whose elements have a part for each replica, in this process."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.per_worker.dataset_distribution import divided_among_replicas, one_for_each_replica


def elements(dataset):
    """Returns the elements of a dataset with a list of parts for each of their tensors."""
    return [
        tf.nest.map_structure(lambda each: [part.numpy().tolist() for part in each.values], element)
        for element in dataset
    ]


def readable(part):
    """Returns a tensor of any kind as nested lists."""
    if isinstance(part, tf.RaggedTensor):
        return part.to_list()
    return (tf.sparse.to_dense(part) if isinstance(part, tf.SparseTensor) else part).numpy().tolist()


def test_consecutive_elements_of_any_shape_are_one_element_for_all_replicas():
    numbers = tf.data.Dataset.from_generator(
        lambda: ([0] * n for n in range(4)), output_signature=tf.TensorSpec([None])
    )
    words = tf.data.Dataset.from_tensor_slices([b"a", b"b", b"c", b"d"]).batch(1)
    grouped = one_for_each_replica(tf.data.Dataset.zip(numbers, {"word": words}), 2)
    assert elements(grouped) == [
        ([[], [0.0]], {"word": [[b"a"], [b"b"]]}),
        ([[0.0] * 2, [0.0] * 3], {"word": [[b"c"], [b"d"]]}),
    ]


def test_the_last_elements_are_filled_up_with_no_rows_or_left_out():
    grouped = one_for_each_replica(tf.data.Dataset.from_tensor_slices(np.ones([5, 2])).batch(2), 2)
    assert int(grouped.cardinality()) == 2
    assert elements(grouped)[1] == [[[1.0, 1.0]], []]
    assert grouped.element_spec.value_type.__name__ == "PerReplica"
    of_fixed_batches = one_for_each_replica(tf.data.Dataset.range(7).batch(2, drop_remainder=True), 2)
    assert elements(of_fixed_batches) == [[[0, 1], [2, 3]]]
    assert int(of_fixed_batches.cardinality()) == 1


def test_batches_of_any_kind_are_divided_by_rows():
    dense = tf.data.Dataset.from_tensor_slices(np.arange(5))
    sparse = tf.data.Dataset.from_tensor_slices(tf.sparse.from_dense(np.eye(5, dtype=np.int64)))
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [], [2, 3], [4], [5]]))
    divided = divided_among_replicas(tf.data.Dataset.zip(dense, sparse, ragged).batch(3), 2)
    found = [[list(map(readable, each.values)) for each in element] for element in divided]
    assert found[0] == [[[0, 1], [2]], [np.eye(5)[:2].tolist(), np.eye(5)[2:3].tolist()], [[[1], []], [[2, 3]]]]
    assert found[1] == [[[3], [4]], [np.eye(5)[3:4].tolist(), np.eye(5)[4:].tolist()], [[[4]], [[5]]]]
    with pytest.raises(ValueError, match="divided among the 2 devices of a worker"):
        divided_among_replicas(tf.data.Dataset.range(4), 2)
