"""Tests of rules that collect gradients: synchronous and with bounded delay; each gradient is in one update."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import BoundedDelay, Synchronous
from tests.deadline import wait_until
from tests.updates.descent import (
    FREE,
    TIMEOUT,
    gated_step,
    held,
    mostly_long,
    new_rule,
    pushing_step,
    regression,
    regression_step,
    run,
    value_of,
)
from tests.updates.parts_of_rules import begin_again, finish_updates, log_of, model_of, stores_of


@pytest.mark.long
def test_adam_gives_the_same_as_one_process_with_averaged_gradients(strategy):
    inputs, labels = regression(2, 24)

    def new():
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        return [keras.Variable([0.1, 0.2, 0.3]), keras.Variable(0.0)], keras.optimizers.Adam(rate)

    with strategy.scope():
        variables, optimizer = new()
        rule = Synchronous(optimizer, variables, grads_to_wait=3)

    @tf.function
    def step(x, y):
        return rule.run(lambda x, y: regression_step(variables, x, y), x, y)

    alone, adam = new()
    for x, y in zip(inputs, labels, strict=True):
        parts = zip(np.split(x, 3), np.split(y, 3), strict=True)
        for future in [strategy.schedule(step, args=part) for part in parts]:
            future.result(TIMEOUT)
        adam.apply(regression_step(alone, x, y)[1], alone)
    for shared, own in zip(variables, alone, strict=True):
        np.testing.assert_allclose(shared.numpy(), own.numpy(), rtol=2e-4, atol=1e-5)
    assert int(optimizer.iterations.numpy()) == rule.version.numpy() == 2


@pytest.mark.long
def test_the_mean_is_clipped_on_its_server_and_gradients_where_no_server_has_all(strategy):
    """The mean of both gradients is (3, 4); the first one alone is (6, 8), and clipped (0.6, 0.8)."""
    for options, step_length in (
        ({"clipnorm": 1.0}, [0.6, 0.8]),
        ({"global_clipnorm": 1.0}, [0.3, 0.4]),
    ):
        with strategy.scope():
            variable = tf.Variable(tf.zeros([2, 1]))
            rule = Synchronous(keras.optimizers.SGD(1.0, **options), [variable], grads_to_wait=2)
        step = pushing_step(rule, lambda gradient: [gradient])
        for gradient in ([[6.0], [8.0]], [[0.0], [0.0]]):
            assert run(strategy, step, 0, tf.constant(gradient))
        np.testing.assert_allclose(-variable.numpy()[:, 0], step_length, rtol=1e-5, err_msg=f"{options}")


def test_pushes_and_flush_apply_each_minibatch_once_although_some_are_rejected(strategy, variables):
    rule = new_rule(strategy, Synchronous, variables, grads_to_wait=3)
    assert rule.flush() == 0
    gradients = [tf.ones_like(variable) for variable in variables]
    step = tf.function(lambda: rule.run(lambda: (tf.constant(1.0), gradients)))
    futures = [strategy.schedule(step) for _ in range(17)]
    assert [future.result(TIMEOUT) for future in futures] == [1.0] * 17
    strategy.join(TIMEOUT)
    statistics = rule.statistics()
    assert statistics.updates == rule.version.numpy() == -value_of(variables) == 5
    assert statistics.pushes - statistics.rejected == 17 == sum(statistics.clocks.values())
    # The mean of the two that wait.
    assert rule.flush() == 2
    assert rule.version.numpy() == -value_of(variables) == 6
    assert rule.flush() == 0


@pytest.fixture
def make_rule(strategy, variables):
    return lambda **settings: new_rule(strategy, BoundedDelay, variables, **settings)


@pytest.mark.parametrize(("max_delay", "grads_to_wait"), mostly_long([(0, 2), (1, 1)], (1, 1)))
def test_no_gradient_is_older_than_max_delay_and_none_is_rejected(
    strategy, variables, make_rule, may_end, max_delay, grads_to_wait
):
    rule, count = make_rule(max_delay=max_delay, grads_to_wait=grads_to_wait), 12
    step = gated_step(rule, variables, may_end)
    slow = held(strategy, rule, step)
    futures = [strategy.schedule(step, (FREE,), worker=1) for _ in range(count - 1)]
    # The other one waits while the slow one has a gradient in flight that would become too old.
    wait_until(lambda: rule.state.workers.is_waiting.numpy()[1])
    assert not all(future.done() for future in futures)
    may_end.assign(True)
    assert all(future.result(TIMEOUT) for future in (slow, *futures))
    strategy.join(TIMEOUT)
    statistics = rule.statistics()
    assert (statistics.pushes, statistics.rejected, statistics.updates) == (count, 0, count // grads_to_wait)
    assert statistics.staleness.count == count
    assert statistics.staleness.max <= max_delay
    assert value_of(variables) == -count / grads_to_wait
    assert statistics.idle_shares[0] == 0 < statistics.idle_shares[1] <= 1


@pytest.mark.long
def test_no_worker_waits_if_the_delay_is_unlimited(strategy, variables, make_rule, may_end):
    rule = make_rule(max_delay=None)
    step = gated_step(rule, variables, may_end)
    slow = held(strategy, rule, step)
    for future in [strategy.schedule(step, (FREE,), worker=1) for _ in range(15)]:
        future.result(TIMEOUT)
    assert not slow.done()
    may_end.assign(True)
    strategy.join(TIMEOUT)
    statistics = rule.statistics()
    assert set(statistics.idle_shares.values()) == {0.0}
    assert (statistics.updates, statistics.rejected, statistics.staleness.max) == (16, 0, 15)
    assert value_of(variables) == -16.0


@pytest.mark.long
def test_zero_delay_with_all_workers_in_an_update_equals_one_process(strategy, variables, make_rule):
    rule = make_rule(max_delay=0, grads_to_wait=2, learning_rate=0.25)
    step = pushing_step(rule, lambda: [variable - 1.0 for variable in variables])
    for _ in range(8):
        strategy.schedule(step)
    strategy.join(TIMEOUT)
    for variable in variables:
        np.testing.assert_allclose(variable.numpy(), np.full(variable.shape, 1 - 0.75**4), rtol=1e-5)
    assert rule.version.numpy() == 4


def ids(*numbers):
    """Returns ids of pushes of workers that do not exist."""
    return tf.constant([[900 + number, 1, 1] for number in numbers], tf.int64)


def add(rule, store, push, value):
    """Adds a gradient to the rows of a server: the same number for all variables."""
    model = model_of(rule)
    numbers = model.by_device[store.device]

    @tf.function(autograph=False)
    def add_there():
        with tf.device(store.device):
            gradients = {number: tf.fill(model.variables[number].shape, value) for number in numbers}
            store.add(tf.identity(push), store.row(gradients, [tf.identity(1.0)]))

    add_there()


def pushed_ones(strategy):
    """Returns a new model, a rule that waits for two gradients, and a step that pushes ones for a given version."""
    with strategy.scope():
        model = [tf.Variable(lambda: tf.zeros([3])), tf.Variable(lambda: tf.zeros([4, 2]))]
    rule = new_rule(strategy, Synchronous, model, grads_to_wait=2)
    return model, rule, tf.function(lambda version: rule.push([tf.ones([3]), tf.ones([4, 2])], version))


@pytest.fixture(scope="module")
def traced(strategy):
    return pushed_ones(strategy)


@pytest.fixture
def model(traced):
    for variable in traced[0]:
        variable.assign(tf.zeros_like(variable))
    return traced[0]


@pytest.fixture
def rule(traced):
    """Waits for two gradients. Has no pushes yet, though its step is traced and built once for all tests."""
    begin_again(traced[1])
    return traced[1]


@pytest.fixture
def push(strategy, traced):
    """Schedules a push of ones for all variables, for a given version, and returns whether it was accepted."""
    return lambda version: bool(run(strategy, traced[2], 0, tf.constant(version, tf.int64)))


def commit(rule, push):
    """Commits a push of version 0 as a worker that dies right after it; returns the update that it completes."""

    @tf.function(autograph=False)
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


def test_a_gradient_of_an_older_version_is_rejected_and_changes_nothing(rule, model, push):
    assert [push(version) for version in (0, 0, 0, 1, 1, 0, 2, 2)] == [True, True, False, True, True, False, True, True]
    statistics = rule.statistics()
    assert (statistics.updates, statistics.pushes, statistics.rejected) == (3, 8, 2)
    assert statistics.staleness.histogram == (6, 1, 1)
    assert value_of(model) == -3.0


def test_a_gradient_that_was_not_committed_is_in_no_update_and_is_removed(rule, model, push):
    first, second = stores_of(rule)
    add(rule, first, ids(1)[0], 100.0)
    assert push(0)
    add(rule, second, ids(2)[0], 100.0)
    # It reached all servers.
    for store in (first, second):
        add(rule, store, ids(3)[0], 100.0)
    assert push(0)
    assert value_of(model) == -1.0
    assert rule.version.numpy() == 1
    for _ in range(3):
        add(rule, first, ids(1)[0], 100.0)
    assert push(1)
    assert push(1)
    assert value_of(model) == -2.0
    # Of each of those two workers its last one.
    assert lengths(first) == {2}


@pytest.mark.parametrize("finisher", ["a push", pytest.param("the client", marks=pytest.mark.long)])
def test_an_unfinished_update_is_finished_once(rule, model, push, finisher):
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
    assert value_of(model) == -2.0


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


def test_some_variables_may_have_no_gradients_but_then_always(strategy):
    variables, rule, step_for_all = pushed_ones(strategy)
    step = pushing_step(rule, [tf.ones([3]), None])
    assert [bool(run(strategy, step)) for _ in range(2)] == [True, True]
    assert (value_of(variables[:1]), value_of(variables[1:])) == (-1.0, 0.0)
    with pytest.raises(ValueError, match="differ in which gradients are None"):
        run(strategy, step_for_all, 0, tf.constant(1, tf.int64))


def test_numbers_that_cannot_be_used_are_refused(strategy, variables):
    for grads_to_wait in (0, -1, 1.5, True, None):
        for kind, more in ((Synchronous, {}), (BoundedDelay, {"max_delay": 1})):
            with pytest.raises(ValueError, match="grads_to_wait must be an integer of at least 1, got"):
                new_rule(strategy, kind, variables, grads_to_wait=grads_to_wait, **more)
    for max_delay in (-1, 1.5, True, float("nan"), "1"):
        with pytest.raises(ValueError, match="max_delay must be an integer of at least 0, or"):
            new_rule(strategy, BoundedDelay, variables, max_delay=max_delay)
