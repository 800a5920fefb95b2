"""Tests of a mutex on a server: operations under it run in one graph at a time, on that server."""

import pytest
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.shared_variable import ServerMutex
from tests.ps_strategy.every_worker import concrete_function
from tests.updates.state.locked_sections import locked_operations, waits_under_locks

TIMEOUT = 120.0
CALLS = 60
NAME = "coordinator/tests/exclusive"


@pytest.fixture
def variable(strategy):
    with strategy.scope():
        return tf.Variable(0.0)


def test_two_functions_that_hold_one_lock_do_not_run_at_once(strategy, variable):
    def adding():
        # Created in each function: a lock is identified by its name.
        lock = ServerMutex(NAME, variable.device)

        @tf.function(autograph=False)
        def add_one_slowly():
            with lock.hold():
                before = variable.read_value()
                matrix = tf.fill([100, 100], before * 1e-3)
                for _ in range(4):
                    matrix = tf.tanh(matrix @ matrix)
                with tf.control_dependencies([matrix]):
                    variable.assign(before + 1.0, read_value=False)

        return add_one_slowly

    steps = adding(), adding()
    for future in [strategy.schedule(steps[number % 2]) for number in range(CALLS)]:
        future.result(TIMEOUT)
    assert variable.numpy() == CALLS


def test_a_mutex_is_held_after_its_inputs_until_all_operations_end_even_by_an_error(strategy, variable):
    lock = ServerMutex(NAME, variable.device)

    @tf.function(autograph=False)
    def step(x):
        doubled = x * 2.0
        with lock.hold([doubled]):
            with tf.control_dependencies([tf.debugging.assert_positive(doubled, "must be positive")]):
                variable.assign_add(doubled, read_value=False)
            after = variable.read_value()
            unused = tf.timestamp(name="unused")
        assert unused.device == lock.device
        return after

    concrete = concrete_function(strategy, step, tf.constant(1.0))
    assert waits_under_locks(concrete) == []
    [held] = [each for each in concrete.graph.get_operations() if each.type == "MutexLock"]
    assert held.device == lock.device
    names = {operation.type for operation in locked_operations(held)}
    assert {"AssignAddVariableOp", "ReadVariableOp", "Timestamp"} <= names
    for _ in range(3):
        future = strategy.schedule(step, args=(tf.constant(-1.0),))
        for wait in (future.result, strategy.join):
            with pytest.raises(tf.errors.InvalidArgumentError, match="must be positive"):
                wait(TIMEOUT)
    assert strategy.schedule(step, args=(tf.constant(3.0),)).result(TIMEOUT) == 6
