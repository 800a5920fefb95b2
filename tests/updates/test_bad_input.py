"""Tests that rules refuse mistakes in the same words and apply no part of them, also if the update itself fails."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import ModelAverage
from tests.updates.descent import TIMEOUT, descend, mostly_long, new_rule, pushing_step, run

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


# Two of them: the checks are in one place, before the rule gets the gradients.
@pytest.mark.parametrize("name", ["asynchronous", "model average"])
def test_each_rule_refuses_each_mistake_when_the_step_is_traced(strategy, variables, name):
    rule = new_rule(strategy, name, variables)

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


@pytest.mark.parametrize("name", mostly_long(["asynchronous", "synchronous"], "asynchronous"))
def test_what_is_not_finite_is_counted_or_refused(strategy, variables, name):
    rule, strict = (new_rule(strategy, name, variables, require_finite=value) for value in (False, True))
    of_rows = [None, rows(tf.constant([[np.inf, 1.0]]), [2])]
    for bad in ([tf.constant([1.0, np.nan, 1.0]), GOOD[1]], of_rows):
        if bad is of_rows and name == "synchronous":
            continue
        for variable in variables:
            variable.assign(tf.zeros_like(variable))
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"variable Variable:0 must be finite.*require_finite"):
            run(strategy, pushing_step(strict, bad), 0)
        with pytest.raises(tf.errors.InvalidArgumentError):
            strategy.join(TIMEOUT)
        assert all(np.isfinite(variable.numpy()).all() for variable in variables)
        run(strategy, pushing_step(rule, bad), 0)
    # No worker waits for the step that failed.
    run(strategy, pushing_step(strict, GOOD), 1)
    assert (sum(strict.statistics().clocks.values()), strict.statistics().not_finite) == (1, 0)
    assert rule.statistics().not_finite == sum(rule.statistics().clocks.values()) == 2 - (name == "synchronous")


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


# Gradients that depend on ids of two rows, other ids with which they do not fit, and the error.
FAULTS = {
    "id too large": (of_ids, [1, 99], r"variable Variable:0 .*from 0 to 3.*\[99\]"),
    "size": (
        lambda ids: [tf.ones([tf.reduce_sum(ids)]), rows(tf.ones([2, 2]), [1, 2])],
        [3, 2],
        r"\[5\] is not compatible with expected shape \[3\](.|\n)*gradient_for_Variable",
    ),
    "unknown count": (
        lambda ids: [tf.ones([3]), rows(tf.ones(tf.stack([tf.size(ids[:2]), 2])), ids)],
        [2, 1, 0],
        r"variable Variable:0 .*a row of values for each.*\[2\].*\[3\]",
    ),
}


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("synchronous", ["id too large"]),
        ("asynchronous", ["size"]),
        pytest.param("model average", ["size", "unknown count"], marks=pytest.mark.long),
    ],
)
def test_a_gradient_of_wrong_shape_fails_its_step_and_is_not_applied(strategy, variables, name, faults):
    for fault in faults:
        for variable in variables:
            variable.assign(tf.zeros_like(variable))
        gradients, unfit, message = FAULTS[fault]
        rule = new_rule(strategy, name, variables)
        signature = [tf.TensorSpec([None], tf.int32)]
        step = tf.function(pushing_step(rule, gradients).python_function, input_signature=signature)
        run(strategy, step, 0, tf.constant([1, 2]))
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            run(strategy, step, 0, tf.constant(unfit))
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            strategy.join(TIMEOUT)
        # No step of another worker sees a part of it, or waits for it. The mean of two workers' models is no sum.
        is_mean = isinstance(rule, ModelAverage)
        for worker in (0 if is_mean else 1, 0):
            run(strategy, step, worker, tf.constant([1, 2]))
        for finish in ("flush", "abort"):
            getattr(rule, finish, lambda: None)()
        statistics = rule.statistics()
        assert sum(statistics.clocks.values()) == 3
        assert is_mean or (statistics.updates, statistics.pushes, statistics.rejected) == (3, 3, 0)
        np.testing.assert_array_equal(variables[0].numpy(), [-3.0] * 3)
        np.testing.assert_array_equal(variables[1].numpy(), [[0, 0], [-3, -3], [-3, -3], [0, 0]])


def careful(variable, gradient, rate):
    """Gradient descent that fails for NaN gradients."""
    descend(variable, tf.debugging.check_numerics(gradient, "a gradient that is no number"), rate)


@pytest.mark.parametrize("name", mostly_long(["synchronous", "delayed"], "synchronous"))
def test_a_failing_update_is_raised_once_and_never_applied_twice(strategy, name):
    with strategy.scope():
        # The first and the third are on one server.
        variables = [tf.Variable(tf.zeros([2])) for _ in range(3)]
    rule = new_rule(strategy, name, variables, careful)
    step = pushing_step(rule, lambda values: [tf.fill([2], value) for value in tf.unstack(values)])
    ones, values = tf.ones([3]), np.ones(3, np.float32)
    values[1] = np.nan
    run(strategy, step, 0, ones)
    # With delayed gradients it fails the step whose pull applies it.
    failing = [strategy.schedule(step, (each,), worker=0) for each in (values, ones)[: 1 + (name == "delayed")]]
    for raises in (lambda: failing[-1].result(TIMEOUT), lambda: strategy.join(TIMEOUT)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="a gradient that is no number"):
            raises()
    for _ in range(3):
        run(strategy, step, 0, ones)
    rule.flush()
    assert rule.version.numpy() == rule.statistics().updates == 5
    assert [variable.numpy().tolist() for variable in variables] == [[-5.0] * 2, [-4.0] * 2, [-5.0] * 2]
