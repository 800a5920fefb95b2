"""Tests of error feedback: what rounding takes from a worker's push is added to its next one."""

import numpy as np
import pytest
import tensorflow as tf

from tests.deadline import wait_until
from tests.updates.descent import new_rule, pushing_step, run

# Of 8 significant bits: 1 + 2**-9 is sent as 1, and the difference is kept.
FINE = 1 + 2**-9


def new_step(strategy, variable, kind="asynchronous", **options):
    rule = new_rule(strategy, kind, [variable], transfer_dtype=tf.bfloat16, **{"error_feedback": True} | options)
    return rule, pushing_step(rule, lambda gradient: [gradient])


def push(strategy, step, *values, worker=0):
    return bool(run(strategy, step, worker, tf.constant(values)))


def test_the_sum_of_pushes_differs_from_the_exact_one_by_one_rounding(strategy):
    random, steps = np.random.default_rng(2), 30
    gradients = (random.normal(size=(steps, 50)) * 10.0 ** random.integers(-3, 3, (steps, 50))).astype(np.float32)
    with strategy.scope():
        variable, other = tf.Variable(tf.zeros([50])), tf.Variable(tf.zeros([50]))
    _, step = new_step(strategy, variable)
    _, step_without = new_step(strategy, other, error_feedback=False)
    for gradient in gradients:
        run(strategy, step, 0, tf.constant(gradient))
        run(strategy, step_without, 0, tf.constant(gradient))
    exact = gradients.sum(0, dtype=np.float64)
    # The last push was at most as large as its gradient and the error before, which is one rounding of a push.
    greatest = np.abs(gradients).max(0)
    one_rounding = 2.0**-8 * greatest * (1 + 2.0**-7)
    of_float32 = steps * 2.0**-23 * np.abs(gradients).sum(0)
    assert (np.abs(-variable.numpy() - exact) <= one_rounding + of_float32).all()
    assert np.linalg.norm(-variable.numpy() - exact) < np.linalg.norm(-other.numpy() - exact)


def test_what_is_too_small_for_one_push_arrives_with_later_ones(strategy):
    with strategy.scope():
        variable = tf.Variable([0.0])
    _, step = new_step(strategy, variable)
    found = []
    for _ in range(5):
        push(strategy, step, FINE)
        found.append(-variable.numpy()[0])
    np.testing.assert_allclose(found, np.arange(1, 6) * FINE, rtol=0, atol=2**-8)
    assert found[0] == 1.0
    assert found[-1] > 5.0


@pytest.mark.long
def test_a_rejected_push_leaves_the_error_as_it_was(strategy):
    with strategy.scope():
        variable = tf.Variable([0.0])
    rule, step = new_step(strategy, variable, "synchronous")
    late = pushing_step(rule, lambda gradient: [gradient], 1)
    assert push(strategy, step, FINE)
    assert variable.numpy().tolist() == [-1.0]
    assert not run(strategy, late, 0, tf.constant([FINE]))
    # The error of the first push: half a unit of the last bit, with which 1 + 2**-8 is halfway, and even upwards.
    assert push(strategy, step, 1 + 2**-8 + 2**-9)
    assert variable.numpy().tolist() == [-1.0 - (1 + 2**-7)]


def test_a_push_that_is_not_finite_leaves_the_error_as_it_was(strategy):
    with strategy.scope():
        variable = tf.Variable([0.0, 0.0])
    _, step = new_step(strategy, variable)
    push(strategy, step, FINE, FINE)
    push(strategy, step, np.inf, np.nan)
    variable.assign([0.0, 0.0])
    push(strategy, step, 2**-9, 0.0)
    assert variable.numpy().tolist() == [-(2**-8), -(2**-9)]


@pytest.mark.long
def test_each_worker_has_errors_and_a_restarted_one_begins_with_zero(strategy, shared_cluster):
    with strategy.scope():
        variable = tf.Variable([0.0])
    _, step = new_step(strategy, variable)
    for worker in (0, 1):
        push(strategy, step, FINE, worker=worker)
    assert variable.numpy().tolist() == [-2.0]
    shared_cluster.kill("worker", 1)
    wait_until(lambda: not strategy.cluster.workers[1].healthy())
    shared_cluster.restart("worker", 1)
    wait_until(strategy.cluster.workers[1].healthy)
    push(strategy, step, 0.0, worker=1)
    assert variable.numpy().tolist() == [-2.0]
    push(strategy, step, 0.0, worker=0)
    assert variable.numpy().tolist() == [-2.0 - 2**-9]


def test_a_variable_of_an_unknown_shape_is_refused(strategy):
    with strategy.scope():
        variable = tf.Variable([1.0], shape=[None])
    with pytest.raises(ValueError, match="error_feedback needs variables of known shapes: that of 'Variable:0' is"):
        new_step(strategy, variable)
