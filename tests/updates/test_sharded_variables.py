"""Tests that rules update sharded variables part by part, as one process updates plain ones."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator import updates
from tests.ps_strategy.sharded.partitioners import partitioned
from tests.updates.descent import descend
from tests.updates.trained_twice import train_twice

TIMEOUT = 240.0
ROWS, WIDTH, STEPS = 8, 2, 4
IDS = np.array([1, 7, 1, 6])
TOUCHED, OTHERS = [1, 6, 7], [0, 2, 3, 4, 5]
TABLE = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
KERNEL = np.random.default_rng(1).normal(size=(5, WIDTH)).astype(np.float32)

RULES = {
    "Asynchronous": updates.Asynchronous,
    "Asynchronous, its embeddings given": lambda optimizer, variables: updates.Asynchronous(
        optimizer, variables, embeddings=variables[:1]
    ),
    "Synchronous": lambda *given: updates.Synchronous(*given, grads_to_wait=1),
    "StaleSynchronous": lambda optimizer, variables: updates.StaleSynchronous(
        optimizer, variables, get_model_frequency=1, embeddings=variables[:1]
    ),
    "BoundedDelay": lambda *given: updates.BoundedDelay(*given, max_delay=2),
    "Delayed": lambda *given: updates.Delayed(*given, delay=math.inf),
    "ModelAverage": lambda optimizer, variables: updates.ModelAverage(optimizer, variables, embeddings=variables[:1]),
}
DEFAULT = {"Asynchronous, its embeddings given"}


def new(make_optimizer=lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1)):
    """Returns a table, a kernel, a scale, and an optimizer that does not decay the kernel."""
    variables = [keras.Variable(TABLE), keras.Variable(KERNEL), keras.Variable(2.0)]
    optimizer = make_optimizer()
    optimizer.exclude_from_weight_decay(var_list=variables[1:])
    return variables, optimizer


def gradients(variables):
    table, kernel, scale = (each.value for each in variables)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.matmul(tf.tanh(tf.gather(table, IDS)), kernel, transpose_b=True) ** 2) * scale
    return tape.gradient(loss, [table, kernel, scale])


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in DEFAULT else pytest.mark.long) for each in RULES]
)
def test_pushes_change_sharded_variables_as_one_process_changes_plain_ones(strategy, name):
    with strategy.scope(), partitioned(3):
        variables, optimizer = new()
        rule = RULES[name](optimizer, variables)
    assert [len(each.value.parts) for each in variables[:2]] == [3, 3]

    here = train_twice(strategy, rule, variables, new, gradients, STEPS)
    if name != "ModelAverage":
        # The kernel of that rule is on the workers.
        np.testing.assert_allclose(np.asarray(variables[0])[TOUCHED], np.asarray(here[0])[TOUCHED], rtol=1e-5)
        np.testing.assert_allclose(variables[1], here[1], rtol=1e-5)
        np.testing.assert_allclose(variables[2], here[2], rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(variables[0])[OTHERS], TABLE[OTHERS])
    assert not np.any(np.isclose(np.asarray(variables[0])[TOUCHED], TABLE[TOUCHED]))
    assert int(optimizer.iterations) == STEPS


@pytest.mark.long
def test_every_push_of_racing_workers_is_in_every_part(strategy):
    with strategy.scope(), partitioned(3):
        table, kernel = tf.Variable(tf.zeros([9, 4])), tf.Variable(tf.zeros([5, 4]))
        rule = updates.Asynchronous(descend, [table, kernel], embeddings=[table], learning_rate=1.0)
    ids = tf.constant([8, 0, 4, 8])

    @tf.function
    def step():
        with rule.pull() as version:
            rows, whole = tf.gather(table, ids), kernel.read_value()
        rule.push([tf.IndexedSlices(tf.ones_like(rows), ids), tf.ones_like(whole)], version)
        return rows, whole

    found = [strategy.schedule(step) for _ in range(40)]
    shapes = {tuple(value.shape for value in future.result(TIMEOUT)) for future in found}
    assert shapes == {((4, 4), (5, 4))}
    np.testing.assert_array_equal(-table.numpy()[:, 0], [40, 0, 0, 0, 40, 0, 0, 0, 80])
    np.testing.assert_array_equal(kernel, np.full([5, 4], -40.0))
    assert rule.statistics().updates == 40


CLIPPED = {
    "a dense gradient": (lambda: tf.ones([4, 1]), {}, [[0.5], [0.5], [0.5], [0.5]]),
    "a scaled loss": (lambda: tf.fill([4, 1], 8.0), {"loss_scale_factor": 8.0}, [[0.5], [0.5], [0.5], [0.5]]),
    "repeated rows": (
        lambda: tf.IndexedSlices(tf.constant([[1.0], [4.0], [2.0]]), tf.constant([0, 3, 0]), tf.constant([4, 1])),
        {},
        [[0.6], [0.0], [0.0], [0.8]],
    ),
    "a small gradient": (lambda: tf.fill([4, 1], 0.25), {}, [[0.25], [0.25], [0.25], [0.25]]),
}


@pytest.mark.parametrize("name", CLIPPED)
def test_the_gradient_of_a_sharded_variable_is_clipped_as_a_whole(strategy, name):
    gradient, options, step_length = CLIPPED[name]
    with strategy.scope(), partitioned(2):
        table, scalar = tf.Variable(tf.zeros([4, 1])), tf.Variable(0.0)
        rule = updates.Asynchronous(keras.optimizers.SGD(1.0, clipnorm=1.0, **options), [table, scalar])
    assert len(table.parts) == 2

    @tf.function
    def step():
        with rule.pull() as version:
            gradients = [gradient(), tf.constant(80.0)]
        return rule.push(gradients, version)

    assert strategy.schedule(step).result(TIMEOUT)
    np.testing.assert_allclose(-table.numpy(), step_length, rtol=1e-5)
    # By its own norm.
    assert scalar.numpy() == -1.0


def test_what_concerns_all_rows_is_refused(strategy):
    with strategy.scope(), partitioned(3):
        table = keras.Variable(TABLE)
        kernel = tf.Variable(KERNEL, constraint=keras.constraints.MaxNorm(1.0))
        with pytest.raises(ValueError, match="Lamb updates whole variables"):
            updates.Asynchronous(keras.optimizers.Lamb(), [table])
        with pytest.raises(ValueError, match="has a constraint"):
            updates.Asynchronous(keras.optimizers.Adam(), [table, kernel])
