"""Tests of results that stay on their workers, and are computed again if these are lost."""

import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.ps_strategy.calls import traced_function

TIMEOUT = 120.0
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


def test_an_argument_that_was_lost_is_computed_again_where_it_is_needed(program, shared_cluster):
    made = program.left(program.make, tf.constant(3.0))
    program.strategy.join(TIMEOUT)
    shared_cluster.kill("worker", 1)
    assert program.result(program.double, made, worker=0).sum() == 6000
    assert int(program.made) == 2
    shared_cluster.restart("worker", 1)
    assert program.result(program.double, made).sum() == 6000
    assert int(program.made) == 2
