"""Tests of queued pushes: complete or not at all, applied once on all servers, whichever worker dies."""

import math

import pytest
import tensorflow as tf

from tests.ps_strategy.every_worker import concrete_function
from tests.updates.descent import pushing_step, value_of
from tests.updates.parts_of_rules import finish_updates, log_of, stores_of
from tests.updates.rules.delayed_steps import entries, make_rule, new_step
from tests.updates.state.locked_sections import waits_under_locks
from tests.updates.state.unfinished_pushes import add, ids

NEVER = math.inf


def commit(rule, push):
    """Queues a push that is on all servers, as a worker that dies right after it."""

    @tf.function
    def run():
        with tf.device(rule.state.home):
            nothing = tf.constant(0, tf.int64)
            return log_of(rule).add(tf.identity(push), nothing, nothing, nothing)[0]

    assert run()


@pytest.mark.long
def test_a_push_that_did_not_reach_all_servers_or_was_not_queued_is_in_no_update(strategy, variables):
    rule = make_rule(strategy, variables, 0)
    step = new_step(strategy, rule, variables)
    stores = stores_of(rule)
    add(rule, stores[0], ids(1)[0], 100.0)
    for store in stores:
        add(rule, store, ids(2)[0], 100.0)
    step(1)
    assert step(1) == (1, -1)
    assert rule.flush() == 1
    assert value_of(variables) == -2.0


@pytest.mark.long
@pytest.mark.parametrize(("finisher", "made_on"), [("a pull", [0]), ("a pull", [0, 1]), ("the client", [])])
def test_an_update_that_a_dead_worker_left_unfinished_is_finished_once(strategy, variables, made_on, finisher):
    rule = make_rule(strategy, variables, 0)
    stores, log = stores_of(rule), log_of(rule)
    for push, value in zip(ids(1, 2), (3.0, 4.0), strict=True):
        for store in stores:
            add(rule, store, push, value)
        commit(rule, push)
    due = log.release(tf.constant(False))
    for number in made_on:
        stores[number].use_once(due)
    assert rule.version.numpy() == 0
    if finisher == "a pull":
        assert new_step(strategy, rule, variables)(0) == (2, -7)
    else:
        finish_updates(rule)
    assert value_of(variables) == -7.0
    assert rule.statistics().staleness.histogram == (1, 1)
    # A late caller changes nothing.
    for store in stores:
        store.use_once(due)
    log.finish(due, tf.constant(1))
    assert rule.version.numpy() == 2
    assert value_of(variables) == -7.0


@pytest.mark.long
def test_applied_rows_are_removed_and_pushes_of_abandoned_calls_not_queued(strategy, variables):
    rule = make_rule(strategy, variables, lambda worker, time: NEVER if worker == 0 else 0.0)
    step = new_step(strategy, rule, variables)
    for _ in range(3):
        step(100, worker=0)
    for _ in range(12):
        step(1, worker=1)
    lists = tf.unstack(stores_of(rule)[0].lists.read_value())
    # Three and the last, and the same number of empty slots.
    assert {int(tf.raw_ops.TensorListLength(input_handle=rows)) for rows in lists} <= {4, 5, 6, 7, 8}
    fence = rule.state.workers.fence
    fence.assign(tf.fill(fence.shape, tf.constant(2**62, tf.int64)))
    step(1)
    # It has applied the last one that was due.
    assert (rule.statistics().rejected, len(entries(rule))) == (1, 3)
    assert rule.flush() == 3
    assert value_of(variables) == -312.0


@pytest.mark.long
def test_no_operation_under_a_lock_waits_for_another_machine(strategy, variables):
    rule = make_rule(strategy, variables, lambda worker, time: tf.random.uniform([]))
    step = pushing_step(rule, [tf.ones(variable.shape) for variable in variables])
    assert waits_under_locks(concrete_function(strategy, step)) == []
