"""Tests of model averaging: local models, and their mean, which is computed at the same time as gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import ModelAverage
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import TIMEOUT
from tests.updates.parts_of_rules import means_of, own_model_of
from tests.updates.rules.averaging_steps import (
    MAX_POLLS,
    NEVER,
    WORKERS,
    ascent,
    make_rule,
    own_models,
    poll_until,
    run,
)

# The algorithm.


def test_what_a_worker_has_changed_moves_the_mean_where_its_model_then_begins(strategy, weights, turn):
    """Workers take turns inside one function each, so that none is idle; compared with the same on plain numbers."""
    order = [0, 1, 0, 0, 2, 1, 2, 0, 1, 1]
    rule = make_rule(strategy, weights)

    @tf.function
    def steps(turns):
        for number in turns:
            polls = poll_until(lambda number=number: turn.read_value() == number)
            with tf.control_dependencies([polls]), rule.pull() as version:
                gradient = -tf.cast(number + 1, tf.float32)
            with tf.control_dependencies([rule.push([tf.fill([2], gradient), gradient], version)]):
                turn.assign_add(1)
        poll_until(lambda: turn.read_value() == len(order))

    turns = [np.flatnonzero(np.equal(order, worker)) for worker in range(WORKERS)]
    futures = [strategy.schedule(steps, (tf.constant(turns[w], tf.int64),), worker=w) for w in range(WORKERS)]
    [future.result(TIMEOUT) for future in futures]

    own, base, shared, seen, staleness = {}, {}, 0.0, {}, []
    for version, worker in enumerate(order):
        seen.setdefault(worker, version)
        change = own.setdefault(worker, shared) - base.setdefault(worker, shared)
        shared += change / len(own)
        base[worker], own[worker] = shared, shared + version + 1
        staleness.append(version - seen[worker])
        seen[worker] = version + 1
    np.testing.assert_allclose(own_models(rule), [own[worker] for worker in range(WORKERS)], rtol=1e-6)
    np.testing.assert_allclose(weights[0].numpy(), [shared] * 2, rtol=1e-6)
    statistics = rule.statistics()
    assert statistics.updates == statistics.pushes == len(order)
    assert statistics.staleness.histogram == tuple(np.bincount(staleness).tolist())
    assert statistics.clocks == {worker: order.count(worker) for worker in range(WORKERS)}
    # Each has pulled the shared model once.
    assert statistics.pulls == len(order) + WORKERS


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 3])
def test_nothing_that_a_worker_has_learned_is_averaged_away(strategy, weights, workers):
    """Each is idle while another one trains."""
    rule = make_rule(strategy, weights)
    step = ascent(rule, weights)
    for worker in range(workers):
        run(strategy, step, worker, 0.0)
    for number in range(6 * workers):
        run(strategy, step, number % workers)
    rule.abort()
    np.testing.assert_allclose(weights[1].numpy(), 6, rtol=1e-6)
    np.testing.assert_allclose(weights[0].numpy(), [6, 6], rtol=1e-6)


@pytest.mark.long
def test_a_worker_that_joins_late_changes_nothing_by_that(strategy, weights):
    rule = make_rule(strategy, weights)
    step = ascent(rule, weights)
    run(strategy, step, 0, 8.0)
    run(strategy, step, 0, 0.0)
    assert weights[1].numpy() == 8
    assert [run(strategy, step, worker, 0.0) for worker in (1, 2)] == [8, 8]
    assert weights[1].numpy() == 8
    run(strategy, step, 1, 3.0)
    rule.abort()
    assert weights[1].numpy() == 9


@pytest.mark.long
def test_a_step_never_reads_variables_of_two_moments(strategy, weights):
    assert weights[0].device != weights[1].device
    rule = make_rule(strategy, weights)

    @tf.function
    def step():
        with rule.pull() as version:
            found = weights[0][0], weights[1].read_value()
        rule.push([-tf.ones_like(weight) for weight in weights], version)
        return found

    futures = [strategy.schedule(step) for _ in range(150)]
    found = np.array([future.result(TIMEOUT) for future in futures])
    np.testing.assert_array_equal(found[:, 0], found[:, 1])


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("period", [0.0, NEVER])
@pytest.mark.long
def test_one_worker_alone_trains_as_one_process_does(strategy, name, period):
    make = OPTIMIZERS[name]
    inputs = np.random.default_rng(1).normal(size=[12, 8, 3]).astype(np.float32)

    def new_weights():
        return [tf.Variable(tf.ones([3, 1])), tf.Variable(tf.zeros([1]))]

    def gradients_of(weights, batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.matmul(batch, weights[0]) + weights[1] - tf.reduce_sum(batch, 1)) ** 2)
        return tape.gradient(loss, weights)

    with strategy.scope():
        weights, optimizer = new_weights(), make()
        rule = ModelAverage(optimizer, weights, period=period)

    @tf.function
    def step(batch):
        return rule.run(lambda: (tf.constant(0.0), gradients_of(weights, batch)))

    for batch in inputs:
        strategy.schedule(step, (tf.constant(batch),), worker=1).result(TIMEOUT)
    rule.abort()
    expected, own_optimizer = new_weights(), make()
    for batch in inputs:
        own_optimizer.apply(gradients_of(expected, tf.constant(batch)), expected)
    for weight, value in zip(weights, expected, strict=True):
        np.testing.assert_allclose(weight.numpy(), value.numpy(), rtol=1e-5, atol=1e-6)
    assert int(optimizer.iterations) == len(inputs)


@pytest.mark.long
def test_every_gradient_is_counted_in_the_iterations_of_the_optimizer(strategy, weights):
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.0)
        rule = ModelAverage(optimizer, weights)
    step = ascent(rule, weights)
    for _ in range(30):
        strategy.schedule(step, (tf.constant(1.0),))
    strategy.join(TIMEOUT)
    assert int(optimizer.iterations) == 30
    assert sum(rule.statistics().clocks.values()) == 30


@pytest.mark.long
def test_variables_of_all_dtypes_and_servers_are_averaged(strategy):
    dtypes = [tf.float32, tf.float16, tf.bfloat16, tf.float64]
    with strategy.scope():
        weights = [tf.Variable(tf.zeros([3], dtype)) for dtype in dtypes]
    assert len({weight.device for weight in weights}) == 2
    rule = make_rule(strategy, weights)
    step = tf.function(
        lambda by: rule.run(lambda: (tf.constant(0), [tf.cast(tf.fill([3], -by), dtype) for dtype in dtypes]))
    )
    for worker, by in enumerate((1.0, 2.0, 6.0)):
        strategy.schedule(step, (tf.constant(by),), worker=worker)
    strategy.join(TIMEOUT)
    models = [np.array(variable.read_all()) for variable in own_model_of(rule).variables]
    rule.abort()
    for weight, values in zip(weights, models, strict=True):
        assert weight.numpy().dtype == values.dtype
        np.testing.assert_allclose(weight.numpy().astype(float), values.astype(float).mean(0), rtol=1e-2)


@pytest.mark.long
def test_several_steps_in_one_function_equal_those_in_several_functions(strategy, weights):
    rule = make_rule(strategy, weights)

    @tf.function
    def steps():
        found = tf.TensorArray(tf.float32, 6)
        for number in tf.range(6):
            with rule.pull() as version:
                found = found.write(number, weights[1].read_value())
            rule.push([-tf.ones_like(weight) for weight in weights], version)
        return found.stack()

    assert strategy.schedule(steps, worker=0).result(TIMEOUT).tolist() == [0, 1, 2, 3, 4, 5]
    assert strategy.schedule(steps, worker=0).result(TIMEOUT).tolist() == [6, 7, 8, 9, 10, 11]
    assert rule.statistics().updates == 12
    assert rule.statistics().staleness.histogram == (12,)


# In parallel with the computation.


@pytest.mark.long
def test_averaging_completes_while_gradients_are_computed(strategy, weights):
    rule = make_rule(strategy, weights)

    @tf.function
    def step():
        with rule.pull() as version:
            # Simulates a long computation: it ends when the averaging of this step has been counted.
            polls = poll_until(lambda: rule.version.read_value() > version)
            with tf.control_dependencies([polls]):
                gradients = [tf.ones_like(weight) for weight in weights]
        rule.push(gradients, version)
        return polls

    for _ in range(3):
        assert strategy.schedule(step, worker=0).result(TIMEOUT) < MAX_POLLS
    assert rule.version.numpy() == 3


@pytest.mark.long
def test_gradients_are_computed_while_averaging_is_delayed(strategy, weights, turn):
    rule = make_rule(strategy, weights)

    model_mean = means_of(rule)[0]

    @tf.function(autograph=False)
    def hold_up():
        """Holds the lock of a server until the other worker has computed its gradients."""
        with model_mean.lock.hold():
            turn.assign(1, read_value=False)
            with tf.device(None):
                return poll_until(lambda: turn.read_value() == 2)

    @tf.function
    def step():
        with rule.pull() as version:
            gradients = [tf.ones_like(weight) + weight for weight in weights]
        with tf.control_dependencies(gradients):
            # The lock is held until here at least, and the push waits for the averaging.
            turn.assign(2)
        rule.push(gradients, version)

    # The first step of a worker takes the mean before it computes anything.
    strategy.schedule(step, worker=0).result(TIMEOUT)
    turn.assign(0)
    held = strategy.schedule(hold_up, worker=1)
    wait_until(lambda: turn.numpy() == 1)
    strategy.schedule(step, worker=0).result(TIMEOUT)
    assert held.result(TIMEOUT) < MAX_POLLS
    assert rule.version.numpy() == 2


@pytest.mark.long
def test_a_change_reaches_all_servers_if_the_step_that_had_it_counted_fails(strategy, weights, turn, monkeypatch):
    rule = make_rule(strategy, weights)
    step = ascent(rule, weights)
    run(strategy, step, 0, 4.0)
    # On the server that does not count.
    [other] = [mean for mean in means_of(rule) if mean.device != rule.version.device]
    advance = other.advance

    def fail_later(counted):
        polls = poll_until(lambda: turn.read_value() == 1)
        with tf.control_dependencies([tf.debugging.Assert(polls < 0, ["as planned"])]):
            return advance(tf.identity(counted))

    monkeypatch.setattr(other, "advance", tf.function(fail_later, autograph=False))
    failing = strategy.schedule(ascent(rule, weights), (tf.constant(1.0),), worker=0)
    # The change is counted, and this server does not add it yet.
    wait_until(lambda: rule.version.numpy() == 2)
    turn.assign(1)
    for raises in (lambda: failing.result(TIMEOUT), lambda: strategy.join(TIMEOUT)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="as planned"):
            raises()
    monkeypatch.undo()
    for _ in range(3):
        run(strategy, step, 0, 0.0)
    rule.abort()
    assert weights[0].numpy().tolist() == [4, 4]
    assert weights[1].numpy() == 4


# Period and warm-up.


@pytest.mark.long
def test_a_worker_averages_no_more_often_than_its_period_allows(strategy, weights):
    period, averagings = 0.1, 3
    rule = make_rule(strategy, weights, period=period)

    @tf.function
    def steps():
        began, number = tf.timestamp(), tf.constant(0)
        while rule.version.read_value() < averagings and number < MAX_POLLS:
            with rule.pull() as version:
                gradients = [-tf.ones_like(weight) for weight in weights]
            rule.push(gradients, version)
            number += 1
        with tf.control_dependencies([number]):
            return tf.timestamp() - began, number

    seconds, number = strategy.schedule(steps, worker=0).result(TIMEOUT)
    assert rule.version.numpy() == averagings
    assert seconds >= averagings * period
    assert own_models(rule)[0] == number


@pytest.mark.long
def test_between_averagings_no_part_of_the_model_is_transferred(strategy, weights):
    rule = make_rule(strategy, weights, period=NEVER)
    step = ascent(rule, weights)
    assert [run(strategy, step, 0) for _ in range(5)] == [0, 1, 2, 3, 4]
    statistics = rule.statistics()
    assert (statistics.pulls, statistics.bytes_pulled) == (1, 12)
    assert (statistics.updates, statistics.pushes, statistics.bytes_pushed) == (0, 0, 0)
    assert weights[1].numpy() == 0


@pytest.mark.long
def test_the_shared_model_is_trained_until_a_worker_has_finished_its_warm_up(strategy, weights):
    rule = make_rule(strategy, weights, warmup_steps=3, period=NEVER)
    step = ascent(rule, weights)
    found = [run(strategy, step, worker) for worker in (0, 1, 0, 1, 0)]
    assert found == [0, 1, 2, 3, 4]
    assert weights[1].numpy() == rule.version.numpy() == 5
    # From now on each worker has its own model, also one with fewer steps, and one that starts late.
    found = [run(strategy, step, worker) for worker in (0, 1, 2, 0, 1, 2)]
    assert found == [5, 5, 5, 6, 6, 6]
    assert weights[1].numpy() == rule.version.numpy() == 5
    assert own_models(rule) == [7, 7, 7]
