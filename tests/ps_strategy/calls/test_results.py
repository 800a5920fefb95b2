"""Tests of the results of futures: their structure, their types and their lifetime."""

import collections

import numpy as np
import tensorflow as tf

from tests.deadline import wait_until
from tests.ps_strategy.every_worker import on_every_worker, unhealthy

TIMEOUT = 60.0

Pair = collections.namedtuple("Pair", ["first", "second"])
STRUCTURES = [
    *((1, 2.5), [1, [2, (3,)]], {"a": 1, "b": {"c": (2, [3])}}, Pair(1, {"x": Pair(2, 3)}), None),
    *((None, 1, {"none": None}), (True, b"bytes"), {}, [(), 1]),
]


def test_a_result_has_the_structure_that_the_function_returned(strategy):  # rows 20, 22
    @tf.function
    def make(number):
        return [
            tf.nest.map_structure(lambda leaf: None if leaf is None else tf.constant(leaf), structure)
            for structure in STRUCTURES
        ][number]

    futures = [strategy.schedule(make, (number,)) for number in range(len(STRUCTURES))]
    for future, structure in zip(futures, STRUCTURES, strict=True):
        tf.nest.assert_same_structure(future.result(TIMEOUT), structure, check_types=True)
        assert future.result(TIMEOUT) == structure
        assert strategy.local_results([future, {"again": future}]) == [structure, {"again": structure}]
    assert strategy.local_results({"a": futures[:2], "b": "text"}) == {"a": STRUCTURES[:2], "b": "text"}


def test_tensors_become_arrays_strings_bytes_and_other_types_stay(strategy):
    dtypes = [np.float32, np.bool_, np.complex64]

    @tf.function
    def make(text):
        arrays = [tf.cast([[0, 1], [1, 0]], dtype) for dtype in dtypes]
        composite = tf.RaggedTensor.from_row_lengths(tf.range(3), [1, 0, 2]), tf.sparse.from_dense([[0, 7]])
        return arrays, tf.strings.join([text, text]), *composite

    arrays, text, ragged, sparse = strategy.schedule(make, (tf.constant(["ä", "b"]),)).result(TIMEOUT)
    for value, dtype in zip(arrays, dtypes, strict=True):
        assert isinstance(value, np.ndarray)
        assert value.dtype == dtype
        np.testing.assert_array_equal(value, np.array([[0, 1], [1, 0]], dtype))
    assert text.tolist() == ["ää".encode(), b"bb"]
    assert ragged.to_list() == [[0], [], [1, 2]]
    assert all("/job:chief" in tensor.device for tensor in (ragged.values, sparse.values))


def test_a_result_reflects_the_updates_made_by_the_function(strategy):  # row 23
    with strategy.scope():
        variables = [tf.Variable(float(number)) for number in range(3)]

    @tf.function
    def update():
        for variable in variables:
            variable.assign_add(1.0)
        return [variable.read_value() for variable in variables]

    assert strategy.schedule(update).result(TIMEOUT) == [1, 2, 3]
    assert [variable.numpy() for variable in variables] == [1, 2, 3]
    devices = [variable.device for variable in variables]
    assert devices[0] == devices[2] != devices[1]
    assert all(device.startswith("/job:ps/") for device in devices)


def test_results_and_arguments_survive_the_death_of_every_worker(strategy, shared_cluster):  # rows 24, 25
    total = tf.function(tf.reduce_sum)
    argument = tf.constant([1, 2, 3])
    workers = range(len(strategy.cluster.workers))
    assert on_every_worker(strategy, total, argument) == [6] * len(workers)
    futures = [strategy.schedule(total, args=(argument,)) for _ in range(6)]
    fetched = strategy.local_results(futures[:3])
    strategy.join(TIMEOUT)
    for index in workers:
        shared_cluster.kill("worker", index)
    try:
        assert strategy.local_results(futures) == fetched * 2 == [6] * 6
    finally:
        for index in workers:
            shared_cluster.restart("worker", index, wait=False)
        for index in workers:
            shared_cluster.wait_ready("worker", index)
    # The restarted workers do not have the tensor and the function that the former processes had.
    assert on_every_worker(strategy, total, argument) == [6] * len(workers)
    assert strategy.local_results(futures) == [6] * 6
    wait_until(lambda: not unhealthy(strategy))
