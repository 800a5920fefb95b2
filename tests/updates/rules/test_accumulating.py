"""Tests of accumulated gradients: each is in the same update on all servers, and in one update only."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import BoundedDelay, Synchronous
from tests.updates.descent import descend, value_of
from tests.updates.parts_of_rules import finish_updates, log_of, stores_of
from tests.updates.state.unfinished_pushes import add, ids

TIMEOUT = 120


@pytest.fixture
def rule(strategy, variables):
    """Waits for two gradients."""
    with strategy.scope():
        return Synchronous(descend, variables, grads_to_wait=2, learning_rate=1.0)


@pytest.fixture
def push(strategy, rule):
    """Schedules a push of ones for all variables, for a given version, and returns whether it was accepted."""

    @tf.function
    def step(version):
        return rule.push([tf.ones([3]), tf.ones([4, 2])], version)

    return lambda version: bool(strategy.schedule(step, args=(tf.constant(version, tf.int64),)).result(TIMEOUT))


def commit(rule, push, version=0):
    """Commits a push as a worker that dies right after it; returns the update that it completes."""

    @tf.function
    def run():
        with tf.device(rule.state.home):
            nothing = tf.constant(0, tf.int64)
            return log_of(rule).add(tf.identity(push), tf.constant(version, tf.int64), nothing, nothing)

    accepted, _, update = run()
    assert accepted
    return update


@pytest.mark.long
def test_a_gradient_that_reached_one_server_only_is_in_no_update(rule, variables, push):
    add(rule, stores_of(rule)[0], ids(1)[0], 100.0)
    assert push(0)
    add(rule, stores_of(rule)[1], ids(2)[0], 100.0)
    assert push(0)
    assert value_of(variables) == -1.0
    assert rule.version.numpy() == 1


@pytest.mark.long
def test_a_gradient_that_reached_all_servers_and_was_not_committed_is_in_no_update(rule, variables, push):
    for store in stores_of(rule):
        add(rule, store, ids(1)[0], 100.0)
    assert push(0)
    assert push(0)
    assert value_of(variables) == -1.0


@pytest.mark.long
@pytest.mark.parametrize(
    ("made_on", "finisher"),
    [(made_on, finisher) for made_on in ((), (0,), (1,), (0, 1)) for finisher in ("a push", "the client")],
)
def test_an_unfinished_update_is_finished_once(rule, variables, push, made_on, finisher):
    stores = stores_of(rule)
    assert push(0)
    for store in stores:
        add(rule, store, ids(1)[0], 3.0)
    update = commit(rule, ids(1)[0])
    assert len(update) == 2
    for number in made_on:
        stores_of(rule)[number].use_once(update)
    assert rule.version.numpy() == 0
    if finisher == "a push":
        assert not push(0)
    else:
        finish_updates(rule)
    assert rule.version.numpy() == 1
    assert value_of(variables) == -2.0
    assert rule.statistics().updates == 1


@pytest.mark.long
def test_using_an_earlier_update_again_changes_nothing(rule, variables, push):
    assert push(0)
    for store in stores_of(rule):
        add(rule, store, ids(1)[0], 3.0)
    late = commit(rule, ids(1)[0])
    finish_updates(rule)
    assert push(1)
    assert push(1)
    assert push(2)
    for store in stores_of(rule):
        store.use_once(late)
    log_of(rule).finish(late, tf.constant(2))
    assert rule.version.numpy() == 2
    assert value_of(variables) == -3.0


def test_removing_incomplete_pushes_drops_no_accepted_gradient(strategy, variables):
    with strategy.scope():
        rule = BoundedDelay(descend, variables, max_delay=None, learning_rate=1.0)
    stores = stores_of(rule)
    # All of one worker and one connection, in order.
    first, second, third = tf.constant([[900, 1, 1], [901, 1, 1], [901, 1, 2]], tf.int64)
    stores[0].is_sparse.update({0: False, 1: False})
    for push in (first, second, third):
        for store in stores:
            add(rule, store, push, 1.0)
    incomplete = first[None]
    for store in stores:
        store.use_once(incomplete)
    for push in (second, third):
        for store in stores:
            store.use_once(push[None])
    assert value_of(variables) == -3.0


@pytest.mark.long
def test_gradients_that_are_in_no_update_are_removed(rule, variables, push):
    store = stores_of(rule)[0]
    for _ in range(2):
        for _ in range(3):
            add(rule, store, ids(1)[0], 100.0)
        version = int(rule.version.numpy())
        assert push(version)
        assert push(version)
        lengths = [
            int(tf.raw_ops.TensorListLength(input_handle=rows))
            for rows in tf.unstack(store.lists.read_value())
            if int(tf.raw_ops.TensorListLength(input_handle=rows))
        ]
        assert set(lengths) == {1}
    assert value_of(variables) == -2.0


@pytest.mark.long
def test_a_push_of_an_abandoned_call_is_not_accepted(strategy, rule, push):
    assert push(0)
    newer = rule.state.workers.fence
    newer.assign(tf.fill(newer.shape, tf.constant(2**40, tf.int64)))
    assert not push(0)
    assert rule.statistics().rejected == 1


def test_pushes_with_gradients_for_other_variables_are_refused_when_traced(strategy, rule, push):
    assert push(0)

    @tf.function
    def other():
        with rule.pull() as version:
            pass
        return rule.push([tf.ones([3]), None], version)

    with pytest.raises(ValueError, match="differ in which gradients are None"):
        strategy.schedule(other)


@pytest.mark.long
def test_a_variable_without_gradients_stays_as_it_is(strategy, variables):
    with strategy.scope():
        rule = Synchronous(descend, variables, grads_to_wait=2, learning_rate=1.0)

    @tf.function
    def step():
        with rule.pull() as version:
            pass
        return rule.push([tf.ones([3]), None], version)

    assert all(strategy.schedule(step).result(TIMEOUT) for _ in range(2))
    np.testing.assert_array_equal(variables[0].numpy(), -np.ones(3))
    np.testing.assert_array_equal(variables[1].numpy(), np.zeros([4, 2]))


@pytest.mark.parametrize("dtype", [tf.float16, pytest.param(tf.bfloat16, marks=pytest.mark.long)])
@pytest.mark.long
def test_half_precision_gradients_are_accumulated_in_float32(strategy, dtype):
    with strategy.scope():
        variables = [tf.Variable(lambda: tf.zeros([2], dtype)) for _ in range(2)]
        rule = Synchronous(descend_half, variables, grads_to_wait=3, learning_rate=1.0)

    @tf.function
    def step(value):
        with rule.pull() as version:
            pass
        rows = tf.IndexedSlices(tf.fill([1], value), tf.constant([1]))
        return rule.push([tf.fill([2], value), rows], version)

    # Their sum overflows in float16, and loses the small one in bfloat16.
    for value in (60000.0, 60000.0, 240.0):
        strategy.schedule(step, args=(tf.constant(value, dtype),)).result(TIMEOUT)
    given = [float(tf.cast(tf.constant(value, dtype), tf.float32)) for value in (60000.0, 60000.0, 240.0)]
    expected = -float(tf.cast(tf.constant(sum(given) / 3), dtype))
    assert [float(value) for value in variables[0].numpy()] == [expected, expected]
    assert [float(value) for value in variables[1].numpy()] == [0.0, expected]


def descend_half(variable, gradient, rate):
    """Plain gradient descent in the variable's own precision."""
    rate = tf.cast(rate, variable.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        variable.scatter_sub(tf.IndexedSlices(rate * gradient.values, gradient.indices))
    else:
        variable.assign_sub(rate * gradient, read_value=False)


@pytest.mark.long
def test_flush_applies_the_mean_of_waiting_gradients_and_returns_their_number(strategy, variables):
    with strategy.scope():
        rule = Synchronous(descend, variables, grads_to_wait=3, learning_rate=1.0)
    assert rule.flush() == 0

    @tf.function
    def step(value):
        with rule.pull() as version:
            pass
        return rule.push([tf.fill([3], value), tf.fill([4, 2], value)], version)

    for value in (1.0, 3.0):
        assert strategy.schedule(step, args=(tf.constant(value),)).result(TIMEOUT)
    assert rule.version.numpy() == 0
    assert rule.flush() == 2
    assert rule.version.numpy() == 1
    assert value_of(variables) == -2.0
    assert rule.flush() == 0


@pytest.mark.long
def test_a_checkpoint_contains_no_waiting_gradients(rule, push, tmp_path):
    assert push(0)
    path = tf.train.Checkpoint(rule=rule).write(str(tmp_path / "checkpoint"))
    names = [name for name, _ in tf.train.list_variables(path) if "OBJECT_GRAPH" not in name]
    assert names
    assert all(name.startswith("rule/state/") for name in names), names


@pytest.mark.parametrize("grads_to_wait", [0, -1, 1.5, True, None])
def test_grads_to_wait_is_an_integer_of_at_least_one(strategy, variables, grads_to_wait):
    with strategy.scope(), pytest.raises(ValueError, match="grads_to_wait must be an integer of at least 1, got"):
        Synchronous(descend, variables, grads_to_wait=grads_to_wait, learning_rate=1.0)
    with strategy.scope(), pytest.raises(ValueError, match="grads_to_wait must be an integer of at least 1, got"):
        BoundedDelay(descend, variables, max_delay=1, grads_to_wait=grads_to_wait, learning_rate=1.0)
