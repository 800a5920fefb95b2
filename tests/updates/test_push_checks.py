"""Tests that all rules refuse a gradient that does not fit its variable, and apply no part of its push."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import Asynchronous, BoundedDelay, Delayed, ModelAverage, StaleSynchronous, Synchronous
from tests.updates.descent import descend, mostly_long

TIMEOUT = 120.0

RULES = {
    "asynchronous": lambda variables: Asynchronous(descend, variables, learning_rate=1.0),
    "unlocked": lambda variables: Asynchronous(descend, variables, use_locking=False, learning_rate=1.0),
    "synchronous": lambda variables: Synchronous(descend, variables, grads_to_wait=1, learning_rate=1.0),
    "stale synchronous": lambda variables: StaleSynchronous(
        descend, variables, get_model_frequency=1, max_lead=1, learning_rate=1.0
    ),
    "bounded delay": lambda variables: BoundedDelay(descend, variables, max_delay=0, learning_rate=1.0),
    "delayed": lambda variables: Delayed(descend, variables, delay=0.0, learning_rate=1.0),
    "model average": lambda variables: ModelAverage(descend, variables, learning_rate=1.0),
    "averaged beside a table": lambda variables: ModelAverage(
        descend, variables, embeddings=variables[1:], learning_rate=1.0
    ),
}


# One by default: the checks are in one place, before the rule gets the gradients.
@pytest.fixture(params=mostly_long(RULES, "asynchronous"))
def rule(request, strategy, variables):
    with strategy.scope():
        return RULES[request.param](variables)


IDS = [tf.TensorSpec([None], tf.int32)]


def step_of(rule, make_gradients, signature=None):
    @tf.function(input_signature=signature)
    def step(*args):
        with rule.pull() as version:
            gradients = make_gradients(*args)
        return rule.push(gradients, version)

    return step


def rows(values, ids):
    return tf.IndexedSlices(values, ids)


def settle(strategy, rule):
    """Waits until all pushed gradients are applied to the variables."""
    strategy.join(TIMEOUT)
    for name in ("flush", "abort"):
        getattr(rule, name, lambda: None)()


def test_floating_point_gradients_are_cast_to_the_dtype_of_their_variable(strategy, rule, variables):
    def make_gradients():
        return [tf.fill([3], tf.constant(2.0, tf.float64)), rows(tf.ones([1, 2], tf.float16), tf.constant([2]))]

    strategy.schedule(step_of(rule, make_gradients)).result(TIMEOUT)
    settle(strategy, rule)
    np.testing.assert_array_equal(variables[0].numpy(), [-2.0] * 3)
    np.testing.assert_array_equal(variables[1].numpy(), [[0, 0], [0, 0], [-1, -1], [0, 0]])


def ids_step(rule):
    """Returns a step that pushes gradients of the given rows."""
    return step_of(rule, lambda ids: [tf.ones([3]), rows(tf.ones([tf.size(ids), 2]), ids)], IDS)


def shape_step(rule):
    """Returns a step that pushes a gradient whose size is the sum of its argument."""

    def make_gradients(ids):
        return [tf.ones([tf.reduce_sum(ids)]), rows(tf.ones([2, 2]), tf.constant([1, 2]))]

    return step_of(rule, make_gradients, IDS)


def count_step(rule):
    """Returns a step that pushes two rows for any number of ids."""
    return step_of(rule, lambda ids: [tf.ones([3]), rows(tf.ones([2, 2]), ids)], IDS)


def unknown_count_step(rule):
    """Returns a step that pushes at most two rows for any number of ids."""
    return step_of(rule, lambda ids: [tf.ones([3]), rows(tf.ones(tf.stack([tf.size(ids[:2]), 2])), ids)], IDS)


FAULTS = {
    "id too large": (ids_step, [1, 99], r"variable Variable:0 .*from 0 to 3.*\[99\]"),
    "id negative": (ids_step, [-1, 2], r"variable Variable:0 .*from 0 to 3.*\[-1\]"),
    "size": (shape_step, [3, 2], r"\[5\] is not compatible with expected shape \[3\](.|\n)*gradient_for_Variable"),
    "count": (count_step, [1, 2, 3], r"\[3\] is not compatible with expected shape \[2\](.|\n)*gradient_for_Variable"),
    "unknown count": (unknown_count_step, [2, 1, 0], r"variable Variable:0 .*a row of values for each.*\[2\].*\[3\]"),
}


def cases():
    """Yields rules and faults; two by default, since all of them are checked in one place."""
    for name in RULES:
        checks_ids = name in ("synchronous", "bounded delay", "delayed")
        for fault in FAULTS if checks_ids else ("size", "count", "unknown count"):
            is_usual = (name, fault) in {("synchronous", "id too large"), ("asynchronous", "size")}
            yield pytest.param(name, fault, marks=[pytest.mark.long] * (not is_usual))


@pytest.mark.parametrize(("rule", "fault"), list(cases()), indirect=["rule"])
def test_a_gradient_of_wrong_shape_fails_its_step_and_is_not_applied(strategy, rule, variables, fault):
    new_step, unfit, message = FAULTS[fault]
    step = new_step(rule)

    def push(*ids):
        return strategy.schedule(step, args=(tf.constant(ids),), worker=0)

    push(1, 2).result(TIMEOUT)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        push(*unfit).result(TIMEOUT)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        strategy.join(TIMEOUT)
    # No step of another worker sees a part of it, or waits for it. The mean of two workers' models is no sum.
    is_mean = isinstance(rule, ModelAverage)
    for worker in (0 if is_mean else 1, 0):
        strategy.schedule(step, args=(tf.constant([1, 2]),), worker=worker).result(TIMEOUT)
    settle(strategy, rule)
    statistics = rule.statistics()
    assert sum(statistics.clocks.values()) == 3
    assert is_mean or (statistics.updates, statistics.pushes, statistics.rejected) == (3, 3, 0)
    np.testing.assert_array_equal(variables[0].numpy(), [-3.0] * 3)
    np.testing.assert_array_equal(variables[1].numpy(), [[0, 0], [-3, -3], [-3, -3], [0, 0]])


def test_row_ids_may_be_empty_or_repeated(strategy, rule, variables):
    step = ids_step(rule)
    for ids in ([], [3], [0, 0, 0]):
        strategy.schedule(step, args=(tf.constant(ids, tf.int32),), worker=0).result(TIMEOUT)
    settle(strategy, rule)
    np.testing.assert_array_equal(variables[1].numpy(), [[-3, -3], [0, 0], [0, 0], [-1, -1]])
