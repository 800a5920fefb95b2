"""Tests of model averaging: local models, and their mean, which is computed at the same time as gradients."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import Asynchronous, ModelAverage
from coordinator.updates.rule_state import pause
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import TIMEOUT
from tests.updates.descent import new_rule
from tests.updates.descent import run as run_on
from tests.updates.parts_of_rules import own_model_of

# So long that no test sees a second averaging, in seconds.
NEVER = 1e6
# How often a worker polls before it gives up; each poll takes ten milliseconds at least.
MAX_POLLS = 3_000


def make_rule(strategy, variables, **options):
    return new_rule(strategy, ModelAverage, variables, **options)


def ascent(rule, weights):
    """Returns a step that adds a number to each weight, and returns the value before."""

    @tf.function
    def step(by):
        with rule.pull() as version:
            found = weights[1].read_value()
        rule.push([-by * tf.ones_like(weight) for weight in weights], version)
        return found

    return step


def run(strategy, step, worker, by=1.0):
    return float(run_on(strategy, step, worker, tf.constant(by)))


def own_models(rule):
    """Returns each worker's present value of the second weight."""
    return [float(value) for value in own_model_of(rule).variables[1].read_all()]


def poll_until(is_true):
    """Waits on the worker, and returns the number of polls, at most MAX_POLLS. To be called in a scheduled function."""

    def poll_again(polls):
        with tf.control_dependencies([pause(tf.constant(1e-2, tf.float64))]):
            return polls + 1

    return tf.while_loop(lambda polls: (polls < MAX_POLLS) & ~is_true(), poll_again, [tf.constant(0)])[0]


def averaged(order):
    """Returns the models of workers that take turns in an order, their mean, and the staleness of each averaging."""
    own, base, shared, seen, staleness = {}, {}, 0.0, {}, []
    for version, worker in enumerate(order):
        seen.setdefault(worker, version)
        change = own.setdefault(worker, shared) - base.setdefault(worker, shared)
        shared += change / len(own)
        base[worker], own[worker] = shared, shared + version + 1
        staleness.append(version - seen[worker])
        seen[worker] = version + 1
    return own, shared, staleness


def test_what_a_worker_has_changed_moves_the_mean_where_its_model_then_begins(strategy, weights, turn):
    """Workers take turns inside one function each, so that none is idle; compared with the same on plain numbers."""
    order = [0, 1, 0, 0, 1, 1, 0, 1]
    rule = make_rule(strategy, weights)

    @tf.function(reduce_retracing=True)
    def steps(turns):
        for number in turns:
            polls = poll_until(lambda number=number: turn.read_value() == number)
            with tf.control_dependencies([polls]), rule.pull() as version:
                gradient = -tf.cast(number + 1, tf.float32)
            with tf.control_dependencies([rule.push([tf.fill([2], gradient), gradient], version)]):
                turn.assign_add(1)
        poll_until(lambda: turn.read_value() >= len(order))

    futures = [strategy.schedule(steps, (np.flatnonzero(np.equal(order, each)),), worker=each) for each in range(2)]
    [future.result(TIMEOUT) for future in futures]

    own, shared, staleness = averaged(order)
    np.testing.assert_allclose(own_models(rule), [own[worker] for worker in range(2)], rtol=1e-6)
    np.testing.assert_allclose(weights[0].numpy(), [shared] * 2, rtol=1e-6)
    statistics = rule.statistics()
    assert statistics.updates == statistics.pushes == len(order)
    assert statistics.staleness.histogram == tuple(np.bincount(staleness).tolist())
    assert statistics.clocks == {worker: order.count(worker) for worker in range(2)}
    # Each has pulled the shared model once.
    assert statistics.pulls == len(order) + 2

    # A model that moves to the mean keeps what it has learned since.
    own = own_model_of(rule)
    before = own.averaged_at.read_all()[0]
    run_on(strategy, steps, 0, np.arange(len(order), len(order) + 4))
    assert own.averaged_at.read_all()[0] > before

    @tf.function(autograph=False)
    def train_and_move():
        own.hand_over(own.read(), tf.constant(1, tf.int64))
        for variable in own.variables:
            variable.assign_add(3.0 * tf.ones_like(variable))
        own.move([10.0 * tf.ones_like(variable) for variable in own.variables])

    run_on(strategy, train_and_move, 0)
    assert own_models(rule)[0] == 10.0 + 3.0


@pytest.mark.long
def test_the_shared_model_is_trained_until_a_worker_has_finished_its_warm_up(strategy, weights):
    rule = make_rule(strategy, weights, warmup_steps=3, period=NEVER)
    step = ascent(rule, weights)
    assert [run(strategy, step, worker) for worker in (0, 1, 0, 0)] == [0, 1, 2, 3]
    assert weights[1].numpy() == rule.version.numpy() == 4
    # From now on each worker has its own model, also one with fewer steps. It transfers nothing before the next
    # averaging but the shared model.
    before = rule.statistics()
    assert [run(strategy, step, worker) for worker in (0, 1, 0, 1)] == [4, 4, 5, 5]
    assert weights[1].numpy() == rule.version.numpy() == 4
    assert own_models(rule) == [6, 6]
    statistics = rule.statistics()
    assert (statistics.pulls - before.pulls, statistics.bytes_pulled - before.bytes_pulled) == (2, 24)
    assert (statistics.pushes, statistics.bytes_pushed) == (before.pushes, before.bytes_pushed)


@pytest.mark.long
def test_models_stay_separate_between_abort_and_resume(strategy, weights, tmp_path):
    rule = make_rule(strategy, weights)
    step = ascent(rule, weights)
    rule.abort()
    assert (rule.version.numpy(), weights[1].numpy()) == (0, 0)
    run(strategy, step, 0, 4.0)
    rule.abort()
    # A worker that has trained nothing does not count.
    assert weights[1].numpy() == 4
    version = int(rule.version.numpy())
    assert [run(strategy, step, worker, by) for worker, by in ((0, 1.0), (0, 1.0), (1, 6.0))] == [4, 5, 4]
    assert weights[1].numpy() == 4
    assert rule.version.numpy() == version
    rule.abort()
    assert weights[1].numpy() == (6 + 10) / 2
    assert rule.version.numpy() == version + 1
    checkpoint = tf.train.Checkpoint(weights=weights, rule=rule)
    path = checkpoint.write(str(tmp_path / "saved"))
    rule.resume()
    rule.resume()
    assert [run(strategy, step, 0) for _ in range(3)] == [8, 9, 10]
    assert rule.version.numpy() == version + 4
    assert weights[1].numpy() == 10
    # What is restored between abort and resume reaches all workers.
    rule.abort()
    checkpoint.read(path).assert_consumed()
    rule.resume()
    assert [run(strategy, step, worker, 0.0) for worker in range(2)] == [8, 8]


@pytest.mark.release
def test_abort_does_not_wait_for_a_worker_that_is_dead(strategy, shared_cluster, weights):
    rule = make_rule(strategy, weights, period=NEVER)
    step = ascent(rule, weights)
    for worker, by in enumerate((2.0, 50.0)):
        run(strategy, step, worker, by)
    shared_cluster.kill("worker", 1)
    try:
        wait_until(lambda: strategy.cluster.statistics().workers[1].state == "lost")
        rule.abort(TIMEOUT)
        assert weights[1].numpy() == 2
    finally:
        shared_cluster.restart("worker", 1)
    assert run(strategy, step, 1) == 2


@pytest.mark.long
def test_model_averaging_may_follow_and_precede_another_rule(strategy, weights):
    first, third = (make_rule(strategy, weights, period=NEVER) for _ in range(2))
    second = new_rule(strategy, Asynchronous, weights)
    step = ascent(first, weights)
    run(strategy, step, 0, 2.0)
    run(strategy, step, 1, 4.0)
    first.switch_to(second)
    assert [run(strategy, step, worker) for worker in (0, 1)] == [3, 4]
    first.switch_to(third)
    assert [run(strategy, step, worker, by) for worker, by in ((0, 1.0), (1, 3.0))] == [5, 5]
    assert weights[1].numpy() == 5
    # Methods of the first rule act on the rule that is in use.
    first.abort()
    assert weights[1].numpy() == 7
    assert third.version.numpy() == 4


def test_invalid_arguments_are_refused(strategy, weights):
    for options, error, message in (
        ({"period": -0.1}, ValueError, "period"),
        ({"period": float("nan")}, ValueError, "period"),
        ({"period": "1"}, TypeError, "period"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps"),
        ({"warmup_steps": True}, TypeError, "warmup_steps"),
        ({"embeddings": weights}, ValueError, "nothing to average"),
    ):
        with pytest.raises(error, match=message):
            make_rule(strategy, weights, **options)
    beside = make_rule(strategy, weights)
    push = tf.function(lambda version: beside.push([tf.ones_like(weight) for weight in weights], version))
    with pytest.raises(ValueError, match="another function"):
        strategy.schedule(push, args=(tf.constant(0, tf.int64),))
