"""Tests of the copies of a model that each worker trains with its own optimizer."""

import keras
import numpy as np
import tensorflow as tf

from coordinator.updates.gradient_optimizer import gradient_optimizer
from coordinator.updates.model import LocalModel, Model
from tests.ps_strategy.every_worker import on_every_worker
from tests.updates.descent import descend

WORKERS = 2
STEPS = 4
START = {0: np.array([3.0, -4.0], np.float32), 1: np.ones([4, 2], np.float32)}


def rows(scale):
    """A gradient of two rows of the second variable."""
    return tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 4.0]]) * scale, tf.constant([2, 0]), tf.constant([4, 2]))


def adam_with_decay(variables):
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=variables[:1])
    return optimizer


def local_model(strategy, make_optimizer, learning_rate=None):
    """Returns the copies, the optimizer of the shared model, and its variables."""
    with strategy.scope():
        variables = [keras.Variable(START[0]), tf.Variable(START[1])]
        optimizer = gradient_optimizer(make_optimizer(variables), variables, learning_rate)
        return LocalModel(Model(variables), optimizer), optimizer, variables


def in_one_process(make_optimizer, scales):
    variables = [keras.Variable(START[0]), tf.Variable(START[1])]
    optimizer = make_optimizer(variables)
    for scale in scales:
        optimizer.apply([tf.constant([1.0, -2.0]) * scale, rows(scale)], variables)
    return [variable.numpy() for variable in variables]


def on_workers(strategy, local, learning_rate):
    """Returns a function that runs a local step on every worker, and returns the values of the copies.

    Args:
      learning_rate: returns the rate of a step.
    """

    @tf.function
    def step():
        if local.steps == 0:
            local.assign(list(START.values()))
        scale = tf.cast(strategy.extended.services.worker_index() + 1, tf.float32)
        local.apply({0: tf.constant([1.0, -2.0]) * scale, 1: rows(scale)}, learning_rate())
        local.steps.assign_add(1)
        return local.values()

    return lambda: on_every_worker(strategy, step)


def own_rate(local, optimizer):
    """Returns the rate of the shared optimizer for the number of local steps."""
    count, *rest = optimizer.scalars
    return lambda: optimizer.learning_rate(
        [tf.cast(local.steps, count.dtype), *(each.read_value() for each in rest)], 0
    )


def test_every_worker_trains_its_copies_as_one_process_trains_variables(strategy):
    local, optimizer, variables = local_model(strategy, adam_with_decay)
    step = on_workers(strategy, local, own_rate(local, optimizer))
    for _ in range(STEPS):
        found = step()
    for worker, values in enumerate(found):
        expected = in_one_process(adam_with_decay, [worker + 1] * STEPS)
        for number in (0, 1):
            np.testing.assert_allclose(values[number], expected[number], rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(local.variables[number].read_all()[worker], values[number])
    assert local.steps.read_all() == [STEPS] * WORKERS
    # The models of other workers were not changed.
    assert optimizer.scalars[0] == 0
    for number in (0, 1):
        np.testing.assert_array_equal(variables[number].numpy(), START[number])
        np.testing.assert_array_equal(local.variables[number].numpy(), np.zeros_like(START[number]))


def test_a_changed_learning_rate_is_used(strategy):
    with strategy.scope():
        rate, sgd = tf.Variable(0.5), keras.optimizers.SGD(0.5)
    local, optimizer, _ = local_model(strategy, lambda _: descend, rate)
    step = on_workers(strategy, local, lambda: optimizer.learning_rate([rate.read_value()], 0))
    assert [list(values[0]) for values in step()] == [[2.5, -3.0], [2.0, -2.0]]
    rate.assign(1.0)
    assert [list(values[0]) for values in step()] == [[1.5, -1.0], [0.0, 2.0]]
    assert [list(values[1][2]) for values in step()] == [[-1.5, -4.0], [-4.0, -9.0]]
    local, optimizer, _ = local_model(strategy, lambda _: sgd)
    step = on_workers(strategy, local, own_rate(local, optimizer))
    assert list(step()[0][0]) == [2.5, -3.0]
    sgd.learning_rate = 1.0
    assert list(step()[0][0]) == [1.5, -1.0]


def test_variables_of_embedding_layers_and_sharded_ones_are_not_copied(strategy, caplog):
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((2,), dtype="int32"), keras.layers.Embedding(9, 3), keras.layers.Dense(1)]
        )
        kernel = tf.Variable(tf.zeros([1025, 256]), name="large")
        parts = Model([*model.trainable_variables, kernel])
        names = [parts.originals[number].name for number in sorted(parts.embeddings)]
        assert names == ["embeddings"]
        LocalModel(parts, gradient_optimizer(descend, parts.given, 1.0))
        [record] = [each for each in caplog.records if "has a copy of large" in each.message]
        assert "embeddings=" in record.message
        caplog.clear()
        LocalModel(Model([kernel], embeddings=()), gradient_optimizer(descend, [kernel], 1.0))
        assert not caplog.records
