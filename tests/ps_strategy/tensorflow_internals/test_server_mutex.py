"""Tests of a mutex on a server: operations under it run in one graph at a time, on that server."""

import pytest
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.shared_variable import ServerMutex, operations_added
from tests.ps_strategy.every_worker import concrete_function
from tests.updates.state.locked_sections import locked_operations, waits_under_locks

TIMEOUT = 120.0
CALLS = 60
NAME = "coordinator/tests/exclusive"


@pytest.fixture
def variable(strategy):
    with strategy.scope():
        return tf.Variable(0.0)


def add_one_slowly(variable):
    before = variable.read_value()
    matrix = tf.fill([100, 100], before * 1e-3)
    for _ in range(4):
        matrix = tf.tanh(matrix @ matrix)
    with tf.control_dependencies([matrix]):
        variable.assign(before + 1.0, read_value=False)


def test_two_functions_that_hold_one_lock_do_not_run_at_once(strategy, variable):
    # Created twice: a lock is identified by its name.
    locks = [ServerMutex(NAME, variable.device) for _ in range(2)]

    @tf.function(autograph=False)
    def first():
        with locks[0].hold():
            add_one_slowly(variable)

    @tf.function(autograph=False)
    def second():
        with locks[1].hold():
            add_one_slowly(variable)

    futures = [strategy.schedule((first, second)[number % 2]) for number in range(CALLS)]
    for future in futures:
        future.result(TIMEOUT)
    assert variable.numpy() == CALLS


def test_a_mutex_is_acquired_after_its_inputs_and_released_after_all_operations(strategy, variable):
    lock = ServerMutex(NAME, variable.device)

    @tf.function(autograph=False)
    def step(x):
        doubled = x * 2.0
        with lock.hold([doubled]):
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
    assert strategy.schedule(step, args=(tf.constant(3.0),)).result(TIMEOUT) == 6


def test_an_error_under_the_lock_releases_it(strategy, variable):
    lock = ServerMutex(NAME, variable.device)

    @tf.function(autograph=False)
    def step(x):
        with lock.hold([x]), tf.control_dependencies([tf.debugging.assert_positive(x, "must be positive")]):
            variable.assign_add(x, read_value=False)

    for _ in range(3):
        future = strategy.schedule(step, args=(tf.constant(-1.0),))
        with pytest.raises(tf.errors.InvalidArgumentError, match="must be positive"):
            future.result(TIMEOUT)
        with pytest.raises(tf.errors.InvalidArgumentError, match="must be positive"):
            strategy.join(TIMEOUT)
    strategy.schedule(step, args=(tf.constant(1.0),)).result(TIMEOUT)
    assert variable.numpy() == 1


def test_operations_added_in_a_scope_are_listed():
    with tf.Graph().as_default():
        before = tf.constant(1)
        with operations_added() as operations:
            inside = before + 1
            assert operations == []
        after = inside + 1
    assert inside.op in operations
    assert before.op not in operations
    assert after.op not in operations
