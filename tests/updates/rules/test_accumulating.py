"""Tests of accumulated gradients: each is in the same update on all servers, and in one update only."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import BoundedDelay, Synchronous
from tests.updates.descent import new_rule, pushing_step, run, value_of
from tests.updates.parts_of_rules import finish_updates, log_of, model_of, stores_of


def ids(*numbers):
    """Returns ids of pushes of workers that do not exist."""
    return tf.constant([[900 + number, 1, 1] for number in numbers], tf.int64)


def add(rule, store, push, value):
    """Adds a gradient to the rows of a server: the same number for all variables."""
    model = model_of(rule)
    numbers = model.by_device[store.device]

    @tf.function
    def add_there():
        with tf.device(store.device):
            gradients = {number: tf.fill(model.variables[number].shape, value) for number in numbers}
            store.add(tf.identity(push), store.row(gradients, [tf.identity(1.0)]))

    add_there()


@pytest.fixture
def rule(strategy, variables):
    """Waits for two gradients."""
    return new_rule(strategy, Synchronous, variables, grads_to_wait=2)


@pytest.fixture
def push(strategy, rule):
    """Schedules a push of ones for all variables, for a given version, and returns whether it was accepted."""
    step = tf.function(lambda version: rule.push([tf.ones([3]), tf.ones([4, 2])], version))
    return lambda version: bool(run(strategy, step, None, tf.constant(version, tf.int64)))


def commit(rule, push):
    """Commits a push of version 0 as a worker that dies right after it; returns the update that it completes."""

    @tf.function
    def commit():
        with tf.device(rule.state.home):
            nothing = tf.constant(0, tf.int64)
            return log_of(rule).add(tf.identity(push), nothing, nothing, nothing)

    accepted, _, update = commit()
    assert accepted
    return update


def lengths(store):
    """Returns the lengths of the lists of a server that are not empty."""
    found = [int(tf.raw_ops.TensorListLength(input_handle=rows)) for rows in tf.unstack(store.lists.read_value())]
    return {length for length in found if length}


def test_a_gradient_that_was_not_committed_is_in_no_update_and_is_removed(rule, variables, push):
    first, second = stores_of(rule)
    add(rule, first, ids(1)[0], 100.0)
    assert push(0)
    add(rule, second, ids(2)[0], 100.0)
    # It reached all servers.
    for store in (first, second):
        add(rule, store, ids(3)[0], 100.0)
    assert push(0)
    assert value_of(variables) == -1.0
    assert rule.version.numpy() == 1
    for _ in range(3):
        add(rule, first, ids(1)[0], 100.0)
    assert push(1)
    assert push(1)
    assert value_of(variables) == -2.0
    # Of each of those two workers its last one.
    assert lengths(first) == {2}


@pytest.mark.parametrize("finisher", ["a push", pytest.param("the client", marks=pytest.mark.long)])
def test_an_unfinished_update_is_finished_once(rule, variables, push, finisher):
    stores = stores_of(rule)
    assert push(0)
    for store in stores:
        add(rule, store, ids(1)[0], 3.0)
    update = commit(rule, ids(1)[0])
    assert len(update) == 2
    stores[0].use_once(update)
    assert rule.version.numpy() == 0
    if finisher == "a push":
        assert not push(0)
    else:
        finish_updates(rule)
    # Using it again changes nothing.
    for store in stores:
        store.use_once(update)
    log_of(rule).finish(update, tf.constant(2))
    assert rule.version.numpy() == rule.statistics().updates == 1
    assert value_of(variables) == -2.0


def test_removing_incomplete_pushes_drops_no_accepted_gradient(strategy, variables):
    rule = new_rule(strategy, BoundedDelay, variables, max_delay=None)
    stores = stores_of(rule)
    # All of one worker and one connection, in order.
    first, second, third = tf.constant([[900, 1, 1], [901, 1, 1], [901, 1, 2]], tf.int64)
    stores[0].is_sparse.update({0: False, 1: False})
    for push in (first, second, third):
        for store in stores:
            add(rule, store, push, 1.0)
    for used in (first, second, third):
        for store in stores:
            store.use_once(used[None])
    assert value_of(variables) == -3.0


def test_a_push_of_an_abandoned_call_is_not_accepted_and_waiting_ones_are_not_saved(rule, push, tmp_path):
    assert push(0)
    newer = rule.state.workers.fence
    newer.assign(tf.fill(newer.shape, tf.constant(2**40, tf.int64)))
    assert not push(0)
    assert rule.statistics().rejected == 1
    path = tf.train.Checkpoint(rule=rule).write(str(tmp_path / "checkpoint"))
    names = [name for name, _ in tf.train.list_variables(path) if "OBJECT_GRAPH" not in name]
    assert names
    assert all(name.startswith("rule/state/") for name in names), names


def test_some_variables_may_have_no_gradients_but_then_always(strategy, rule, variables, push):
    step = pushing_step(rule, [tf.ones([3]), None])
    assert run(strategy, step)
    assert run(strategy, step)
    np.testing.assert_array_equal(variables[0].numpy(), -np.ones(3))
    np.testing.assert_array_equal(variables[1].numpy(), np.zeros([4, 2]))
    with pytest.raises(ValueError, match="differ in which gradients are None"):
        push(1)


def test_flush_applies_the_mean_of_waiting_gradients_and_returns_their_number(strategy, variables):
    rule = new_rule(strategy, Synchronous, variables, grads_to_wait=3)
    assert rule.flush() == 0
    step = pushing_step(rule, lambda value: [tf.fill([3], value), tf.fill([4, 2], value)])
    for value in (1.0, 3.0):
        assert run(strategy, step, None, tf.constant(value))
    assert rule.version.numpy() == 0
    assert rule.flush() == 2
    assert rule.version.numpy() == 1
    assert value_of(variables) == -2.0
    assert rule.flush() == 0


def test_numbers_that_cannot_be_used_are_refused(strategy, variables):
    for grads_to_wait in (0, -1, 1.5, True, None):
        for kind, more in ((Synchronous, {}), (BoundedDelay, {"max_delay": 1})):
            with pytest.raises(ValueError, match="grads_to_wait must be an integer of at least 1, got"):
                new_rule(strategy, kind, variables, grads_to_wait=grads_to_wait, **more)
    for max_delay in (-1, 1.5, True, float("nan"), "1"):
        with pytest.raises(ValueError, match="max_delay must be an integer of at least 0, or"):
            new_rule(strategy, BoundedDelay, variables, max_delay=max_delay)
