"""Tests of the asynchronous rule: no update is lost, locking works, and stale gradients are scaled."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import Asynchronous, decisions
from coordinator.updates.settings import AsynchronousSettings
from tests.updates.descent import descend

TIMEOUT = 240.0
# How long to wait for a lost update, in seconds.
DEADLINE = 240.0
PUSHES = 30


def add_one_slowly(variable, gradient, rate):
    """An update function that reads, waits a little, and writes the read value plus one."""
    before = variable.read_value()
    matrix = tf.fill([200, 200], before * 1e-3)
    for _ in range(8):
        matrix = tf.tanh(matrix @ matrix)
    with tf.control_dependencies([matrix]):
        variable.assign(before + 1.0)


def ones_for(rule, variables):
    """Returns a step that pushes ones with a staleness increased by `behind`."""

    @tf.function
    def step(behind):
        with rule.pull() as version:
            gradients = [tf.ones_like(variable) for variable in variables]
        return rule.push(gradients, version - behind)

    return step


def run(strategy, step, times=1, behind=0):
    futures = [strategy.schedule(step, args=(tf.constant(behind, tf.int64),)) for _ in range(times)]
    assert [bool(future.result(TIMEOUT)) for future in futures] == [True] * times


def test_every_push_of_racing_workers_is_applied_and_counted_once(strategy):
    with strategy.scope():
        variables = [keras.Variable(tf.zeros([3])) for _ in range(4)]
        optimizer = keras.optimizers.SGD(1.0)
        rule = Asynchronous(optimizer, variables)
    run(strategy, ones_for(rule, variables), PUSHES)
    for variable in variables:
        np.testing.assert_array_equal(variable.numpy(), [-PUSHES] * 3)
    assert rule.version.numpy() == PUSHES
    assert int(optimizer.iterations.numpy()) == PUSHES
    statistics = rule.statistics()
    assert (statistics.updates, statistics.pushes, statistics.pulls, statistics.rejected) == (PUSHES, PUSHES, PUSHES, 0)
    assert statistics.staleness.count == PUSHES
    assert sum(statistics.clocks.values()) == PUSHES


def test_with_locking_updates_that_read_and_write_lose_nothing(strategy):
    with strategy.scope():
        variable = tf.Variable(0.0)
        rule = Asynchronous(add_one_slowly, [variable], use_locking=True, learning_rate=1.0)
    run(strategy, ones_for(rule, [variable]), PUSHES)
    assert variable.numpy() == PUSHES == rule.version.numpy()


@pytest.mark.long
def test_without_locking_updates_that_read_and_write_lose_some(strategy):
    with strategy.scope():
        variable = tf.Variable(0.0)
        rule = Asynchronous(add_one_slowly, [variable], use_locking=False, learning_rate=1.0)
    step, deadline = ones_for(rule, [variable]), time.monotonic() + DEADLINE
    pushes = 0
    while variable.numpy() == pushes:
        assert time.monotonic() < deadline, f"None of {pushes} unlocked updates was lost."
        run(strategy, step, PUSHES)
        pushes += PUSHES
    assert 0 < variable.numpy() < pushes
    # The version is counted atomically.
    assert rule.version.numpy() == rule.statistics().updates == pushes


@pytest.mark.parametrize("use_locking", [True, False])
@pytest.mark.long
def test_updates_that_only_add_lose_nothing_with_and_without_locking(strategy, use_locking):
    with strategy.scope():
        variables = [tf.Variable(tf.zeros([2])) for _ in range(3)]
        rule = Asynchronous(descend, variables, use_locking=use_locking, learning_rate=1.0)
    run(strategy, ones_for(rule, variables), PUSHES)
    for variable in variables:
        np.testing.assert_array_equal(variable.numpy(), [-PUSHES] * 2)
    statistics = rule.statistics()
    assert statistics.updates == statistics.pushes == statistics.pulls == statistics.staleness.count == PUSHES
    assert sum(statistics.clocks.values()) == PUSHES


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


OPTIMIZERS = {
    "function": lambda: (descend, {"learning_rate": 0.6}),
    "Keras, a number": lambda: (keras.optimizers.SGD(0.6), {}),
    "Keras, a schedule": lambda: (
        keras.optimizers.SGD(keras.optimizers.schedules.PiecewiseConstantDecay([100], [0.6, 60.0])),
        {},
    ),
}
# Modulation, staleness, and the factor of the learning rate.
SCALES = [(False, 3, 1.0), (True, 3, 1 / 3), (scale_by_cases, 3, 0.5)]
MORE_SCALES = [
    *SCALES,
    (True, 0, 1.0),
    (True, 1, 1.0),
    (True, 8, 1 / 8),
    (scale_by_cases, 2, 1.0),
    (lambda staleness: 1 / (1 + tf.cast(staleness, tf.float32)), 3, 0.25),
]


@pytest.mark.parametrize(
    ("name", "scales"),
    [
        ("Keras, a number", SCALES),
        *(pytest.param(name, MORE_SCALES, marks=pytest.mark.long) for name in OPTIMIZERS),
    ],
)
def test_only_a_stale_gradient_has_a_scaled_learning_rate(strategy, name, scales):
    for modulation, staleness, scale in scales:
        with strategy.scope():
            variables = [keras.Variable(tf.zeros([2])) for _ in range(3)]
            optimizer, options = OPTIMIZERS[name]()
            inner = [variable.value for variable in variables]
            rule = Asynchronous(optimizer, inner, lr_staleness_modulation=modulation, **options)
        assert len({variable.device for variable in inner}) == 2
        step = ones_for(rule, inner)
        run(strategy, step, behind=staleness)
        for variable in inner:
            np.testing.assert_allclose(variable.numpy(), [-0.6 * scale] * 2, rtol=1e-6)
        run(strategy, step)
        for variable in inner:
            np.testing.assert_allclose(variable.numpy(), [-0.6 * (scale + 1)] * 2, rtol=1e-6)
        assert rule.statistics().staleness.histogram[staleness] >= 1
        if not callable(optimizer):
            np.testing.assert_allclose(optimizer.learning_rate, 0.6)


@pytest.mark.long
def test_concurrent_gradients_are_scaled_each_by_its_own_staleness(strategy):
    with strategy.scope():
        variables = [tf.Variable(0.0) for _ in range(4)]
        rule = Asynchronous(descend, variables, lr_staleness_modulation=True, learning_rate=1.0)
    step, behind = ones_for(rule, variables), [tf.constant(number, tf.int64) for number in (0, 2, 7)]
    futures = [strategy.schedule(step, args=(behind[number % 3],)) for number in range(PUSHES)]
    assert all(future.result(TIMEOUT) for future in futures)
    histogram = rule.statistics().staleness.histogram
    expected = sum(count * decisions.learning_rate_scale(staleness) for staleness, count in enumerate(histogram))
    assert sum(histogram) == PUSHES
    assert expected < PUSHES
    for variable in variables:
        np.testing.assert_allclose(variable.numpy(), -expected, rtol=1e-5)


def test_a_server_without_gradients_is_not_updated(strategy):
    with strategy.scope():
        variables = [tf.Variable(1.0) for _ in range(2)]
        rule = Asynchronous(descend, variables, lr_staleness_modulation=True, learning_rate=0.5)

    for number in range(2):

        @tf.function
        def step(_, number=number):
            with rule.pull() as version:
                gradients = [tf.constant(1.0) if number == each else None for each in range(2)]
            return rule.push(gradients, version)

        run(strategy, step)
        assert [variable.numpy() for variable in variables] == [0.5, 1.0 if number == 0 else 0.5]
    assert rule.version.numpy() == 2


@pytest.mark.parametrize("modulation", [None, "no", 0.5, lambda: 1.0, lambda a, b, c: 1.0])
def test_a_modulation_is_yes_no_or_a_function(strategy, modulation):
    with strategy.scope(), pytest.raises(TypeError, match="must be True, False, or a function of the staleness"):
        Asynchronous(descend, [tf.Variable(0.0)], lr_staleness_modulation=modulation, learning_rate=0.1)


def test_what_modulates_the_rate_may_take_the_version_too(strategy):
    with strategy.scope():
        variable = tf.Variable(0.0)
        rule = Asynchronous(
            descend, [variable], lr_staleness_modulation=lambda stale, version: 10 * stale + version, learning_rate=1.0
        )
    step = ones_for(rule, [variable])
    for behind, expected in ((0, 0.0), (3, -31.0), (0, -33.0)):
        run(strategy, step, behind=behind)
        assert variable.numpy() == expected


def test_an_argument_of_a_modulation_that_has_a_default_is_not_the_version():
    scale = AsynchronousSettings(lambda staleness, power=2: staleness**power).learning_rate_scale
    assert scale(3, 100) == 9


def halved(version):
    if version < 2:
        return 1.0
    return 0.5


@pytest.mark.parametrize(
    "learning_rate",
    [halved, keras.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 0.5])],
    ids=["function", "schedule"],
)
def test_the_rate_of_an_update_function_may_depend_on_the_version(strategy, learning_rate):
    with strategy.scope():
        variable = tf.Variable(0.0)
        rule = Asynchronous(descend, [variable], learning_rate=learning_rate)
    step = ones_for(rule, [variable])
    for _ in range(4):
        run(strategy, step)
    assert variable.numpy() == -3.0


@pytest.mark.parametrize(
    ("learning_rate", "message"),
    [
        (
            "0.1",
            "a number, a scalar tf.Variable, or a function of the model's version that returns a number, got",
        ),
        (True, "got True"),
        (lambda: 0.1, "raises TypeError"),
        (lambda version: tf.fill([2], 0.1), "returns .*shape=\\(2,\\)"),
    ],
)
def test_a_learning_rate_that_cannot_be_used_is_refused_at_once(strategy, learning_rate, message):
    with strategy.scope(), pytest.raises(TypeError, match=message):
        Asynchronous(descend, [tf.Variable(0.0)], learning_rate=learning_rate)
