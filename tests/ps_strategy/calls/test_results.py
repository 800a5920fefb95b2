"""Tests of the results of futures: their structure, types and lifetime, and those that stay on their workers."""

import collections

import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.ps_strategy.calls import traced_function
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import on_every_worker, unhealthy

TIMEOUT = 120.0

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


ONES = np.ones(1000, np.float32)


@pytest.fixture
def copies(monkeypatch) -> list[int]:
    """Grows by one with each result that is copied to the client."""
    found: list[int] = []
    copy = traced_function.copy_to_client

    def counted(value, timeout=None):
        found.append(1)
        return copy(value, timeout)

    monkeypatch.setattr(traced_function, "copy_to_client", counted)
    return found


class Program:
    """Functions that count, on a parameter server, how often they have run."""

    def __init__(self, strategy: coordinator.ParameterServerStrategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.made, self.doubled = tf.Variable(0), tf.Variable(0)

        @tf.function
        def make(scale):
            self.made.assign_add(1)
            return {"values": scale * tf.ones([1000]), "name": tf.constant("made")}

        @tf.function
        def double(made):
            self.doubled.assign_add(1)
            return 2.0 * made["values"]

        self.make, self.double = make, double
        self.total = tf.function(tf.reduce_sum)

    def left(self, fn, *args, worker=1) -> coordinator.Future:
        return self.strategy.schedule(fn, args, worker=worker, fetch=False)

    def result(self, fn, *args, worker=1):
        return self.strategy.schedule(fn, args, worker=worker).result(TIMEOUT)


@pytest.fixture(scope="module")
def functions(strategy) -> Program:
    return Program(strategy)


@pytest.fixture
def program(functions) -> Program:
    for count in (functions.made, functions.doubled):
        count.assign(0)
    return functions


def test_a_result_that_was_left_is_passed_on_without_the_client(program, copies):
    made = program.left(program.make, tf.constant(3.0))
    doubled = program.left(program.double, made)
    assert program.result(program.total, doubled) == 6000
    assert made.done()
    assert not copies
    assert program.result(program.total, doubled, worker=0) == 6000, "on another worker"
    assert len(copies) == 1
    np.testing.assert_array_equal(doubled.result(), 6.0 * ONES)
    assert len(copies) == 1, "it is on the client by now"


def test_result_fetches_what_was_left_once_in_the_structure_of_the_function(program, copies):
    made = program.left(program.make, tf.constant(3.0))
    for _ in range(2):
        found = made.result(TIMEOUT)
        assert isinstance(found["values"], np.ndarray)
        assert found["name"] == b"made"
    assert len(copies) == 1
    assert program.strategy.local_results([made])[0]["values"].sum() == 3000
    assert (made.attempts, made.may_have_run_twice, int(program.made)) == (1, False, 1)


def test_what_was_lost_with_its_worker_is_computed_again_by_lineage(program, shared_cluster):
    made = program.left(program.make, tf.constant(3.0))
    doubled = program.left(program.double, made)
    program.strategy.join(TIMEOUT)
    shared_cluster.kill("worker", 1)
    shared_cluster.restart("worker", 1)
    np.testing.assert_array_equal(doubled.result(TIMEOUT), 6.0 * ONES)
    assert (int(program.made), int(program.doubled)) == (2, 2)
    assert (made.attempts, doubled.attempts, doubled.may_have_run_twice) == (2, 2, True)
    # Computed where it was needed, and left there.
    assert made.result(TIMEOUT)["values"].sum() == 3000
    assert int(program.made) == 2
