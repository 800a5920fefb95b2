"""Tests that refused, failing, cancelled and killed steps leave whole updates, and no worker that waits."""

import random
import threading

import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import StaleSynchronous, Synchronous
from coordinator.updates.rule_state import pause
from tests.deadline import wait_until
from tests.program_runner import ProgramRunner
from tests.updates.descent import TIMEOUT, descend, new_rule, pushing_step, run, value_of

GOOD = [tf.ones([3]), tf.ones([4, 2])]


def rows(values, ids):
    return tf.IndexedSlices(values, tf.constant(ids) if isinstance(ids, list) else ids)


# What is pushed, and the error.
MISTAKES = {
    "one gradient too few": (GOOD[:1], ValueError, "push takes 2 gradients.* got 1"),
    "no list": (GOOD[0], TypeError, "push takes a list of 2 gradients"),
    "only None": ([None, None], ValueError, "All gradients are None"),
    "integers": ([tf.ones([3], tf.int32), None], TypeError, "variable Variable:0 .*float32.*got int32"),
    "complex numbers": ([tf.ones([3], tf.complex64), None], TypeError, "variable Variable:0 .*got complex64"),
    "another rank": ([None, tf.ones([4])], ValueError, r"Variable:0 must have its shape \(4, 2\), got \(4,\)"),
    "another order": (GOOD[::-1], ValueError, r"Variable:0 must have its shape \(3,\), got \(4, 2\)"),
    "no such row": ([None, rows(tf.ones([1, 2]), [4])], ValueError, "variable Variable:0 .*from 0 to 3, got 4"),
    "a negative row": ([None, rows(tf.ones([2, 2]), [1, -1])], ValueError, "Variable:0 .*from 0 to 3, got -1"),
    "longer rows": ([None, rows(tf.ones([1, 3]), [1])], ValueError, r"Variable:0 .*got values of shape \(1, 3\)"),
    "more rows": ([None, rows(tf.ones([2, 2]), [1])], ValueError, "Variable:0 .*one for each of the indices"),
    "fractional ids": ([None, rows(tf.ones([1, 2]), [1.0])], TypeError, "integers as indices, got float32"),
}
VERSIONS = {"none": "got 'none'", 0.5: "got 0.5", (1, 2): r"got one of shape \(2,\)"}


class TracedEnoughError(Exception):
    """Ends a trace, of which nothing is to be run."""


def test_each_mistake_is_refused_when_the_step_is_traced(strategy, variables):
    rule = new_rule(strategy, "asynchronous", variables)

    def step():
        for version in (0, rule.version.read_value()):
            with pytest.raises(ValueError, match=r"rule.push\(\) found no rule.pull\(\) of this rule"):
                rule.push(GOOD, version)
        with rule.pull() as pulled:
            pass
        for gradients, error, message in MISTAKES.values():
            with pytest.raises(error, match=message):
                rule.push(gradients, pulled)
        for version, message in VERSIONS.items():
            with pytest.raises(TypeError, match=rf"must be the value of its rule.pull\(\), an int64 scalar; {message}"):
                rule.push(GOOD, version)
        raise TracedEnoughError

    with pytest.raises(TracedEnoughError):
        strategy.schedule(tf.function(step, autograph=False))
    statistics = rule.statistics()
    assert (statistics.updates, statistics.pushes, statistics.pulls) == (0, 0, 0)


def test_what_is_not_finite_is_counted_or_refused(strategy, variables):
    rule, strict = (
        new_rule(strategy, "asynchronous", variables, require_finite=require_finite) for require_finite in (False, True)
    )
    steps = {each: pushing_step(each, lambda first, of_row: [first, rows(of_row, [2])]) for each in (rule, strict)}
    good = tf.ones([3]), tf.ones([1, 2])
    for bad in ((tf.constant([1.0, np.nan, 1.0]), good[1]), (good[0], tf.constant([[np.inf, 1.0]]))):
        for variable in variables:
            variable.assign(tf.zeros_like(variable))
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"variable Variable:0 must be finite.*require_finite"):
            run(strategy, steps[strict], 0, *bad)
        with pytest.raises(tf.errors.InvalidArgumentError):
            strategy.join(TIMEOUT)
        assert all(np.isfinite(variable.numpy()).all() for variable in variables)
        run(strategy, steps[rule], 0, *bad)
    # No worker waits for the step that failed.
    run(strategy, steps[strict], 1, *good)
    assert (sum(strict.statistics().clocks.values()), strict.statistics().not_finite) == (1, 0)
    assert rule.statistics().not_finite == sum(rule.statistics().clocks.values()) == 2


def of_ids(ids):
    return [tf.ones([3]), rows(tf.ones([tf.size(ids), 2]), ids)]


def test_gradients_are_cast_and_row_ids_may_be_empty_or_repeated(strategy, variables):
    rule = new_rule(strategy, "asynchronous", variables)
    cast = [tf.fill([3], tf.constant(2.0, tf.float64)), rows(tf.ones([1, 2], tf.float16), [2])]
    run(strategy, pushing_step(rule, cast))
    step = tf.function(pushing_step(rule, of_ids).python_function, input_signature=[tf.TensorSpec([None], tf.int32)])
    for ids in ([], [3], [0, 0, 0]):
        run(strategy, step, 0, tf.constant(ids, tf.int32))
    np.testing.assert_array_equal(variables[0].numpy(), [-5.0] * 3)
    np.testing.assert_array_equal(variables[1].numpy(), [[-3, -3], [0, 0], [-1, -1], [-1, -1]])


# A rule, gradients that depend on the ids of two rows, other ids with which they do not fit, and the error.
FAULTS = {
    "id too large": ("synchronous", of_ids, [1, 99], r"variable Variable:0 .*from 0 to 3.*\[99\]"),
    "size": (
        "asynchronous",
        lambda ids: [tf.ones([tf.reduce_sum(ids)]), rows(tf.ones([2, 2]), [1, 2])],
        [3, 2],
        r"\[5\] is not compatible with expected shape \[3\](.|\n)*gradient_for_Variable",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_gradient_of_wrong_shape_fails_its_step_and_is_not_applied(strategy, variables, fault):
    name, gradients, unfit, message = FAULTS[fault]
    rule = new_rule(strategy, name, variables)
    step = tf.function(pushing_step(rule, gradients).python_function, input_signature=[tf.TensorSpec([None], tf.int32)])
    run(strategy, step, 0, tf.constant([1, 2]))
    for raises in (lambda: run(strategy, step, 0, tf.constant(unfit)), lambda: strategy.join(TIMEOUT)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            raises()
    # No step of another worker sees a part of it, or waits for it.
    for worker in (1, 0):
        run(strategy, step, worker, tf.constant([1, 2]))
    statistics = rule.statistics()
    assert sum(statistics.clocks.values()) == 3
    assert (statistics.updates, statistics.pushes, statistics.rejected) == (3, 3, 0)
    np.testing.assert_array_equal(variables[0].numpy(), [-3.0] * 3)
    np.testing.assert_array_equal(variables[1].numpy(), [[0, 0], [-3, -3], [-3, -3], [0, 0]])


def careful(variable, gradient, rate):
    """Gradient descent that fails for NaN gradients."""
    descend(variable, tf.debugging.check_numerics(gradient, "a gradient that is no number"), rate)


def test_a_failing_update_is_raised_once_and_never_applied_twice(strategy):
    with strategy.scope():
        # The first and the third are on one server.
        variables = [tf.Variable(tf.zeros([2])) for _ in range(3)]
    rule = new_rule(strategy, "synchronous", variables, careful)
    step = pushing_step(rule, lambda values: [tf.fill([2], value) for value in tf.unstack(values)])
    ones, values = tf.ones([3]), np.ones(3, np.float32)
    values[1] = np.nan
    run(strategy, step, 0, ones)
    failing = strategy.schedule(step, (values,), worker=0)
    for raises in (lambda: failing.result(TIMEOUT), lambda: strategy.join(TIMEOUT)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="a gradient that is no number"):
            raises()
    for _ in range(3):
        run(strategy, step, 0, ones)
    rule.flush()
    assert rule.version.numpy() == rule.statistics().updates == 5
    assert [variable.numpy().tolist() for variable in variables] == [[-5.0] * 2, [-4.0] * 2, [-5.0] * 2]


WORKERS, ROUNDS = 2, 5

# Each rule, and whether an update is made on all servers or on none.
RULES = {
    "synchronous": (Synchronous, {"grads_to_wait": 2}, True),
    "stale synchronous": (StaleSynchronous, {"get_model_frequency": 2, "max_lead": 1}, False),
}


@pytest.mark.long
@pytest.mark.parametrize("name", RULES)
def test_after_cancelled_steps_a_rule_trains_on(strategy, variables, name):
    kind, settings, is_whole = RULES[name]
    chance, moment, rule = random.Random(3), threading.Event(), new_rule(strategy, kind, variables, **settings)

    def body():
        with tf.control_dependencies([pause(tf.random.uniform([], 0.0, 0.01, tf.float64))]):
            return tf.constant(0.0), [-tf.ones_like(variable) for variable in variables]

    step = tf.function(lambda: rule.run(body))
    for number in range(ROUNDS):
        pushes = rule.statistics().pushes
        futures = [strategy.schedule(step) for _ in range(60)]
        wait_until(lambda before=pushes: rule.statistics().pushes > before, TIMEOUT)
        # At any point of a step.
        moment.wait(chance.uniform(0.0, 0.05))
        strategy.cancel_all()
        assert all(future.done() for future in futures)
        # One worker alone must not wait for those that were cancelled.
        trained = [strategy.schedule(step, worker=number % WORKERS) for _ in range(WORKERS)]
        strategy.join(TIMEOUT)
        assert all(future.exception(0) is None for future in trained)
    statistics = rule.statistics()
    assert statistics.pushes > ROUNDS * WORKERS
    assert not is_whole or value_of(variables) == statistics.updates


# A gradient of -1 with a learning rate of 1, so that both variables, each on another server, count the updates.
PROGRAM = """
import random, threading
import tensorflow as tf
import coordinator
from coordinator.testing import LocalCluster
from coordinator.updates import Asynchronous, BoundedDelay, Delayed, StaleSynchronous, Synchronous
from coordinator.updates.rule_state import pause
from tests.updates.descent import new_rule

STEPS, DEATHS, SOME_TIME, CHANCE = 60, 2, threading.Event(), random.Random(1)

def leaves_steps_at_least_once(statistics, values):
    # What a torn push may do: an update that reached one server alone. Its step is run once more.
    assert statistics.updates >= STEPS - DEATHS and min(values) >= STEPS, (statistics, values)
    assert max(values) - min(values) <= DEATHS, values

def leaves_whole_updates(statistics, values):
    assert values[0] == values[1] == statistics.updates, (statistics, values)
    assert statistics.pushes - statistics.rejected >= STEPS, statistics

def leaves_whole_queue(statistics, values):
    # What the last steps have pushed waits for another pull.
    assert statistics.pushes - statistics.rejected >= statistics.updates, (statistics, values)
    leaves_whole_updates(statistics, values)

RULES = [
    (Asynchronous, {}, leaves_steps_at_least_once, None),
    (StaleSynchronous, {"get_model_frequency": 3, "max_lead": 4}, leaves_steps_at_least_once, None),
    (Delayed, {"delay": 0.1}, leaves_whole_queue, None),
    (Synchronous, {"grads_to_wait": 2}, leaves_whole_updates, None),
    (BoundedDelay, {"max_delay": 2}, leaves_whole_updates, 2),
    (BoundedDelay, {"max_delay": 1, "grads_to_wait": 2}, leaves_whole_updates, 1),
]

def run(kind, settings, check, most_staleness):
    with strategy.scope():
        variables = [tf.Variable(0.0), tf.Variable(0.0)]
    rule = new_rule(strategy, kind, variables, **settings)

    def body(is_slow):
        with tf.control_dependencies([pause(tf.where(is_slow, 0.1, 0.01))]):
            return tf.constant(0.0), [tf.constant(-1.0), tf.constant(-1.0)]

    @tf.function
    def step():
        is_slow = strategy.extended.services.worker_index() == 0
        return rule.run(lambda: body(is_slow))

    futures = [strategy.schedule(step) for _ in range(STEPS)]
    for _ in range(DEATHS):
        worker = CHANCE.randrange(3)
        SOME_TIME.wait(CHANCE.uniform(0.2, 1.0))
        cluster.kill("worker", worker)
        SOME_TIME.wait(CHANCE.uniform(0.0, 0.5))
        cluster.restart("worker", worker)
    strategy.join(timeout=240)
    assert all(future.done() for future in futures)
    statistics = rule.statistics()
    print(statistics, [float(variable) for variable in variables])
    check(statistics, [float(variable) for variable in variables])
    assert most_staleness is None or statistics.staleness.max <= most_staleness, statistics
    # Training continues: no worker is waited for, and no lock is held.
    futures = [strategy.schedule(step) for _ in range(30)]
    strategy.join(timeout=240)
    assert rule.statistics().pushes >= statistics.pushes + 30

with LocalCluster(workers=3, ps=2) as cluster, coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
    for rule in RULES:
        run(*rule)
"""


@pytest.mark.cluster
@pytest.mark.release
def test_dying_workers_leave_whole_updates_and_no_worker_waiting(run_program: ProgramRunner) -> None:
    run_program(PROGRAM, timeout=900)
