"""Tests of the asynchronous rule: no update is lost, locking works, and stale gradients are scaled."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import Asynchronous
from coordinator.updates.rule_state import pause
from coordinator.updates.settings import AsynchronousSettings
from tests.updates.descent import TIMEOUT, descend, new_rule, value_of

PUSHES = 30


def ones_for(rule, variables):
    """Returns a step that pushes ones with a staleness increased by `behind`."""

    @tf.function
    def step(behind):
        with rule.pull() as version:
            gradients = [tf.ones_like(variable) for variable in variables]
        return rule.push(gradients, version - behind)

    return step


def run(strategy, step, times=1, behind=0, worker=0):
    behind = tf.constant(behind, tf.int64)
    futures = [strategy.schedule(step, args=(behind,), worker=worker) for _ in range(times)]
    assert [bool(future.result(TIMEOUT)) for future in futures] == [True] * times


def test_every_push_of_racing_workers_is_applied_and_counted_once(strategy):
    with strategy.scope():
        variables = [keras.Variable(tf.zeros([3])) for _ in range(4)]
        optimizer = keras.optimizers.SGD(1.0)
        rule = Asynchronous(optimizer, variables)
    run(strategy, ones_for(rule, variables), PUSHES, worker=None)
    assert value_of(variables) == -PUSHES
    assert rule.version.numpy() == PUSHES
    assert int(optimizer.iterations.numpy()) == PUSHES
    statistics = rule.statistics()
    assert (statistics.updates, statistics.pushes, statistics.pulls, statistics.rejected) == (PUSHES, PUSHES, PUSHES, 0)
    assert statistics.staleness.count == PUSHES
    assert sum(statistics.clocks.values()) == PUSHES


@pytest.mark.parametrize("use_locking", [True, False])
def test_of_two_updates_that_read_and_write_one_is_lost_without_locking_alone(strategy, use_locking):
    with strategy.scope():
        variable, readers = (tf.Variable(0.0) for _ in range(2))

    def add_one(variable, gradient, rate):
        """Reads, waits until another update has read as well, and writes; with locking it waits in vain."""
        before = variable.read_value()
        with tf.control_dependencies([before]), tf.device(variable.device):
            has_read = readers.assign_add(1.0, read_value=False)
            with tf.control_dependencies([has_read]):
                polls = tf.while_loop(
                    lambda polls: (polls < (20 if use_locking else 3000)) & (readers.read_value() < 2.0),
                    lambda polls: polls + 1 + pause(tf.constant(0.01, tf.float64)),
                    [tf.constant(0)],
                )[0]
        with tf.control_dependencies([polls]):
            variable.assign(before + 1.0)
            if use_locking:
                readers.assign_sub(1.0)

    rule = new_rule(strategy, "asynchronous", [variable], add_one, use_locking=use_locking)
    step = ones_for(rule, [variable])
    futures = [strategy.schedule(step, args=(tf.constant(0, tf.int64),), worker=worker) for worker in (0, 1)]
    assert all(future.result(TIMEOUT) for future in futures)
    assert variable.numpy() == (2.0 if use_locking else 1.0)
    # The version is counted atomically.
    assert rule.version.numpy() == rule.statistics().updates == 2


@pytest.mark.parametrize(("allowed", "indices"), [(False, [3, 1, 0]), (True, [3, 1, 3])])
def test_rows_of_one_index_are_summed_unless_there_may_be_several(strategy, allowed, indices):
    with strategy.scope():
        table = tf.Variable(tf.zeros([5, 2]))
        seen = tf.Variable(tf.zeros([3], tf.int64))

    def descend_and_note(variable, gradient, rate):
        # Missing values are zeros.
        seen.assign(tf.pad(gradient.indices, [[0, 3 - tf.size(gradient.indices)]]))
        descend(variable, gradient, rate)

    with strategy.scope():
        rule = Asynchronous(
            descend_and_note, [table], embeddings=[table], learning_rate=0.5, allow_duplicate_indices=allowed
        )

    @tf.function
    def step(_):
        with rule.pull() as version:
            pass
        values = tf.constant([[1.0, 2.0], [10.0, 20.0], [3.0, 4.0]])
        return rule.push([tf.IndexedSlices(values, tf.constant([3, 1, 3], tf.int64))], version)

    run(strategy, step)
    np.testing.assert_array_equal(table.numpy(), [[0, 0], [-5, -10], [0, 0], [-2, -3], [0, 0]])
    np.testing.assert_array_equal(seen.numpy(), indices)


def scale_by_cases(staleness):
    if staleness > 2:
        return 0.5
    return 1.0


def test_only_a_stale_gradient_has_a_scaled_learning_rate(strategy):
    # Modulation, staleness, and the factor of the learning rate.
    for modulation, staleness, scale in ((True, 3, 1 / 3), (scale_by_cases, 3, 0.5)):
        with strategy.scope():
            variables = [tf.Variable(tf.zeros([2])) for _ in range(2)]
            optimizer = keras.optimizers.SGD(0.6)
            rule = Asynchronous(optimizer, variables, lr_staleness_modulation=modulation)
        assert len({variable.device for variable in variables}) == 2
        step = ones_for(rule, variables)
        for behind, factor in ((staleness, scale), (0, scale + 1)):
            run(strategy, step, behind=behind)
            for variable in variables:
                np.testing.assert_allclose(variable.numpy(), [-0.6 * factor] * 2, rtol=1e-6)
        assert rule.statistics().staleness.histogram[staleness] >= 1
        np.testing.assert_allclose(optimizer.learning_rate, 0.6)


def halved(version):
    if version < 2:
        return 1.0
    return 0.5


def test_modulations_and_rates_may_depend_on_the_version(strategy):
    with strategy.scope():
        variables = [tf.Variable(0.0) for _ in range(3)]
    # An argument with a default is not the version.
    assert AsynchronousSettings(lambda staleness, power=2: staleness**power).learning_rate_scale(3, 100) == 9
    rule = new_rule(
        strategy, "asynchronous", variables[:1], lr_staleness_modulation=lambda stale, version: 10 * stale + version
    )
    step = ones_for(rule, variables[:1])
    for behind, expected in ((0, 0.0), (3, -31.0), (0, -33.0)):
        run(strategy, step, behind=behind)
        assert variables[0].numpy() == expected
    for variable, rate in zip(
        variables[1:], (halved, keras.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 0.5])), strict=True
    ):
        run(strategy, ones_for(new_rule(strategy, "asynchronous", [variable], learning_rate=rate), [variable]), 4)
        assert variable.numpy() == -3.0


def test_modulations_and_rates_that_cannot_be_used_are_refused_at_once(strategy, variables):
    for modulation in (None, "no", 0.5, lambda: 1.0, lambda a, b, c: 1.0):
        with pytest.raises(TypeError, match="must be True, False, or a function of the staleness"):
            new_rule(strategy, "asynchronous", variables, lr_staleness_modulation=modulation)
    for rate, message in (
        ("0.1", "a number, a scalar tf.Variable, or a function of the model's version that returns a number, got"),
        (True, "got True"),
        (lambda: 0.1, "raises TypeError"),
        (lambda version: tf.fill([2], 0.1), r"returns .*shape=\(2,\)"),
    ):
        with pytest.raises(TypeError, match=message):
            new_rule(strategy, "asynchronous", variables, learning_rate=rate)
