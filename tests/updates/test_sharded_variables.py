"""Tests that rules update rows, and sharded variables part by part, as one process updates plain ones."""

import math
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator import updates
from tests.ps_strategy.sharded.partitioners import partitioned
from tests.updates.descent import mostly_long, pushing_step, run

ROWS, WIDTH, STEPS = 8, 2, 4
IDS = np.array([1, 7, 1, 6])
TOUCHED, OTHERS = [1, 6, 7], [0, 2, 3, 4, 5]
TABLE = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
KERNEL = np.random.default_rng(1).normal(size=(5, WIDTH)).astype(np.float32)

# The number of parts, the rule, and whether its table is among its embeddings.
CASES = {
    "rows, synchronous": (1, partial(updates.Synchronous, grads_to_wait=1), False),
    "parts, asynchronous": (3, updates.Asynchronous, True),
    "parts, several at a time": (3, partial(updates.StaleSynchronous, get_model_frequency=1), True),
    "parts, delayed": (3, partial(updates.Delayed, delay=math.inf), False),
    "parts, model average": (3, updates.ModelAverage, True),
}


def new():
    """Returns a table, a kernel, a scale, and an optimizer that does not decay the kernel."""
    variables = [keras.Variable(TABLE), keras.Variable(KERNEL), keras.Variable(2.0)]
    optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_list=variables[1:])
    return variables, optimizer


def gradients(variables):
    table, kernel, scale = (each.value for each in variables)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.matmul(tf.tanh(tf.gather(table, IDS)), kernel, transpose_b=True) ** 2) * scale
    found = tape.gradient(loss, [table, kernel, scale])
    assert isinstance(found[0], tf.IndexedSlices)
    return found


@pytest.mark.parametrize("name", mostly_long(CASES, "rows, synchronous", "parts, asynchronous"))
def test_pushed_rows_and_parts_change_as_in_one_process_with_dense_gradients(strategy, name):
    parts, kind, is_embedding = CASES[name]
    with strategy.scope(), partitioned(parts):
        variables, optimizer = new()
        rule = kind(optimizer, variables, **({"embeddings": variables[:1]} if is_embedding else {}))
    assert [len(getattr(each.value, "parts", [each])) for each in variables[:2]] == [parts] * 2
    step = pushing_step(rule, lambda: gradients(variables))
    here, own_optimizer = new()
    for _ in range(STEPS):
        assert run(strategy, step, 0)
        if isinstance(rule, updates.Delayed):
            assert rule.flush() == 1
        own_optimizer.apply([tf.convert_to_tensor(each) for each in gradients(here)], here)
    if not isinstance(rule, updates.ModelAverage):
        # The kernel of that rule is on the workers.
        np.testing.assert_allclose(np.asarray(variables[0])[TOUCHED], np.asarray(here[0])[TOUCHED], rtol=1e-5)
        np.testing.assert_allclose(variables[1], here[1], rtol=1e-5)
        np.testing.assert_allclose(variables[2], here[2], rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(variables[0])[OTHERS], TABLE[OTHERS])
    assert not np.any(np.isclose(np.asarray(variables[0])[TOUCHED], TABLE[TOUCHED]))
    assert int(optimizer.iterations) == STEPS


def test_the_gradient_of_a_sharded_variable_is_clipped_as_a_whole(strategy):
    repeated = tf.IndexedSlices(tf.constant([[1.0], [4.0], [2.0]]), tf.constant([0, 3, 0]), tf.constant([4, 1]))
    for gradient, options, step_length in (
        (tf.fill([4, 1], 8.0), {"loss_scale_factor": 8.0}, [[0.5], [0.5], [0.5], [0.5]]),
        (repeated, {}, [[0.6], [0.0], [0.0], [0.8]]),
    ):
        with strategy.scope(), partitioned(2):
            table, scalar = tf.Variable(tf.zeros([4, 1])), tf.Variable(0.0)
            rule = updates.Asynchronous(keras.optimizers.SGD(1.0, clipnorm=1.0, **options), [table, scalar])
        assert len(table.parts) == 2
        assert run(strategy, pushing_step(rule, [gradient, tf.constant(80.0)]))
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
