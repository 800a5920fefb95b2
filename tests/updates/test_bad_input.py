"""Tests that each rule refuses each mistake in the same words, and changes nothing."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import (
    Accumulating,
    Asynchronous,
    BoundedDelay,
    Delayed,
    ModelAverage,
    StaleSynchronous,
    Synchronous,
)
from tests.updates.descent import descend, run


class OwnRule(Accumulating):
    """A rule of a user, whose methods are not reached by what is refused."""

    sends_pulled_values = True

    def is_accepted(self, worker, pulled_version):
        return self.version >= pulled_version

    def combine(self, variable, gradients, workers, pulled):
        return tf.reduce_sum(gradients + 0.0 * pulled, 0)


RULES = {
    "asynchronous": Asynchronous,
    "own": OwnRule,
    "several at a time": lambda *model, **common: StaleSynchronous(
        *model, get_model_frequency=2, grads_to_wait=2, **common
    ),
    "synchronous": lambda *model, **common: Synchronous(*model, grads_to_wait=1, **common),
    "stale synchronous": lambda *model, **common: StaleSynchronous(*model, get_model_frequency=2, max_lead=1, **common),
    "bounded delay": lambda *model, **common: BoundedDelay(*model, max_delay=0, **common),
    "delayed": lambda *model, **common: Delayed(*model, delay=0.0, **common),
    "model average": ModelAverage,
}

GOOD = [tf.ones([3]), tf.ones([4, 2])]
NAN = [tf.ones([3]), tf.constant([[1.0, 1.0], [np.nan, 1.0], [1.0, 1.0], [1.0, 1.0]])]
INFINITE = [tf.constant([1.0, -np.inf, 1.0]), tf.ones([4, 2])]


def rows(values, ids):
    return [None, tf.IndexedSlices(tf.ones(values), tf.constant(ids))]


# What is pushed, and the error.
MISTAKES: dict[str, tuple[Any, type[Exception], str]] = {
    "one gradient too few": (GOOD[:1], ValueError, "push takes 2 gradients.* got 1"),
    "one gradient too many": ([*GOOD, None], ValueError, "push takes 2 gradients.* got 3"),
    "no list": (GOOD[0], TypeError, "push takes a list of 2 gradients"),
    "only None": ([None, None], ValueError, "All gradients are None"),
    "integers": ([tf.ones([3], tf.int32), None], TypeError, "variable Variable:0 .*float32.*got int32"),
    "complex numbers": ([tf.ones([3], tf.complex64), None], TypeError, "variable Variable:0 .*got complex64"),
    "text": (["a", None], TypeError, "variable Variable:0 .*got string"),
    "another shape": ([tf.ones([5]), None], ValueError, r"Variable:0 must have its shape \(3,\), got \(5,\)"),
    "another rank": ([None, tf.ones([4])], ValueError, r"Variable:0 must have its shape \(4, 2\), got \(4,\)"),
    "another order": (GOOD[::-1], ValueError, r"Variable:0 must have its shape \(3,\), got \(4, 2\)"),
    "no such row": (rows([1, 2], [4]), ValueError, "variable Variable:0 .*must be from 0 to 3, got 4"),
    "a negative row": (rows([2, 2], [1, -1]), ValueError, "variable Variable:0 .*must be from 0 to 3, got -1"),
    "longer rows": (rows([1, 3], [1]), ValueError, r"variable Variable:0 .*got values of shape \(1, 3\)"),
    "more rows than ids": (rows([2, 2], [1]), ValueError, "variable Variable:0 .*one for each of the indices"),
    "fractional ids": (rows([1, 2], [1.0]), TypeError, "variable Variable:0 .*integers as indices, got float32"),
}
VERSIONS = {"none": "got 'none'", 0.5: "got 0.5", (1, 2): r"got one of shape \(2,\)"}


class TracedEnoughError(Exception):
    """Ends a trace, of which nothing is to be run."""


@pytest.fixture(params=RULES)
def new_rule(request, strategy, variables):
    def new_rule(**options):
        with strategy.scope():
            return RULES[request.param](descend, variables, learning_rate=1.0, **options)

    return new_rule


def step_of(rule, gradients):
    @tf.function
    def step():
        with rule.pull() as version:
            pass
        return rule.push(gradients, version)

    return step


def test_each_rule_refuses_each_mistake_when_the_step_is_traced(strategy, new_rule):
    rule = new_rule()

    def step():
        with pytest.raises(ValueError, match=r"rule.push\(\) found no rule.pull\(\) of this rule"):
            rule.push(GOOD, 0)
        with pytest.raises(ValueError, match=r"rule.push\(\) found no rule.pull\(\) of this rule"):
            rule.push(GOOD, rule.version.read_value())
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


def check_that_what_is_not_finite_is_counted(strategy, rule):
    for gradients in (GOOD, NAN, INFINITE):
        run(strategy, step_of(rule, gradients), 0)
    statistics = rule.statistics()
    assert (sum(statistics.clocks.values()), statistics.not_finite) == (3, 2)
    assert "2 NOT FINITE, staleness" in str(statistics)


def check_that_what_is_not_finite_is_refused(strategy, rule, variables):
    bad, good = step_of(rule, NAN), step_of(rule, GOOD)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"variable Variable:0 must be finite.*require_finite"):
        run(strategy, bad, 0)
    with pytest.raises(tf.errors.InvalidArgumentError):
        strategy.join(120.0)
    assert all(np.isfinite(variable.numpy()).all() for variable in variables)
    # No worker waits for the step that failed.
    run(strategy, good, 1)
    statistics = rule.statistics()
    assert (sum(statistics.clocks.values()), statistics.not_finite) == (1, 0)


@pytest.mark.long
def test_each_rule_counts_or_refuses_what_is_not_finite(strategy, new_rule, variables):
    check_that_what_is_not_finite_is_refused(strategy, new_rule(require_finite=True), variables)
    check_that_what_is_not_finite_is_counted(strategy, new_rule())


def test_rows_that_are_not_finite_are_counted_or_refused(strategy, variables):
    with strategy.scope():
        rule = Asynchronous(descend, variables, learning_rate=1.0)
        strict = Asynchronous(descend, variables, learning_rate=1.0, require_finite=True)
    row = [None, tf.IndexedSlices(tf.constant([[np.inf, 1.0]]), tf.constant([2]))]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"Variable:0 must be finite.*Tensor had Inf"):
        run(strategy, step_of(strict, row))
    with pytest.raises(tf.errors.InvalidArgumentError):
        strategy.join(120.0)
    assert np.isfinite(variables[1].numpy()).all()
    run(strategy, step_of(rule, row))
    assert (strict.statistics().not_finite, rule.statistics().not_finite) == (0, 1)
