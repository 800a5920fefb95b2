"""Tests that `fit` and update rules train a table as one process trains an embedding."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.embeddings import Constant, Embedding, Table
from coordinator.updates import Asynchronous, Synchronous
from tests.embeddings import tables
from tests.embeddings.tables import TIMEOUT

DIM, ROWS, BATCH, STEPS = 3, 40, 8, 6
# No batch has a key twice: Keras in one process would clip repeated rows one by one.
X = np.concatenate(
    [np.random.default_rng(step).permutation(ROWS)[: 4 * BATCH].reshape(BATCH, 4) for step in range(STEPS)]
)
Y = np.random.default_rng(7).normal(size=[BATCH * STEPS, 1]).astype(np.float32)
KERNEL = np.random.default_rng(8).normal(size=[4 * DIM, 1]).astype(np.float32)
RATE = 0.1

optimizers = keras.optimizers
# Plain gradient descent at the rate of the table, so that one process computes the same with a variable.
SAME = {
    "accumulation and clipnorm": lambda: optimizers.SGD(RATE, gradient_accumulation_steps=2, clipnorm=0.1),
    "scaled losses and global_clipnorm": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(RATE, global_clipnorm=0.2), 8.0, 2
    ),
}
# They do to the other variables what they do not do to a table.
OTHERS = {
    "averages": lambda: optimizers.SGD(RATE, use_ema=True, ema_overwrite_frequency=3, weight_decay=0.1),
    "Lamb for a kernel": lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(optimizers.SGD(RATE), {".*kernel": optimizers.Lamb(RATE)})
    ),
}


def model_of(embedding, optimizer):
    """Returns a compiled model whose only weights with random values are given ones."""
    model = keras.Sequential(
        [keras.Input((4,), dtype="int64"), embedding, keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    model.layers[-1].set_weights([KERNEL, np.zeros(1, np.float32)])
    model.compile(optimizer, "mse")
    return model


def make_table(strategy, name="rows"):
    with strategy.scope():
        return Table(name, DIM, 200, lambda rows, gradient: rows.assign_sub(RATE * gradient), Constant(0.5))


def train(model, *batches):
    """Runs steps one after the other."""
    for batch in batches:
        part = slice(batch * BATCH, (batch + 1) * BATCH)
        model.train_on_batch(X[part], Y[part])


def model_here(make):
    """Returns the same model with a variable instead of a table, for one process."""
    initializer = keras.initializers.Constant(0.5)
    return model_of(keras.layers.Embedding(ROWS, DIM, embeddings_initializer=initializer), make())


@pytest.mark.long
def test_fit_trains_a_table_as_one_process_trains_a_variable(shared_cluster, strategy):
    table, make = make_table(strategy), SAME["scaled losses and global_clipnorm"]
    with strategy.scope():
        model = model_of(Embedding(table), make())
    here = model_here(make)
    for each in (model, here):
        train(each, *range(STEPS))
    rows = np.asarray(here.layers[0].embeddings)
    np.testing.assert_allclose(table.lookup(np.arange(ROWS)), rows, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.layers[-1].kernel, here.layers[-1].kernel, rtol=1e-5, atol=1e-6)
    assert not np.allclose(rows, 0.5)
    assert all(200 not in each.shape for each in model.optimizer.variables)


def test_a_restore_undoes_gradients_that_wait_for_an_update(shared_cluster, strategy, tmp_path):
    table, make = make_table(strategy), SAME["accumulation and clipnorm"]
    with strategy.scope():
        model = model_of(Embedding(table), make())
    here = model_here(make)
    train(model, 0, 1)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.write(str(tmp_path / "saved"))
    train(model, 2)
    checkpoint.read(path).assert_consumed()
    train(model, 3, 4)
    train(here, 0, 1, 3, 4)
    np.testing.assert_allclose(model.layers[-1].kernel, here.layers[-1].kernel, rtol=1e-5, atol=1e-6)
    expected = np.asarray(here.layers[0].embeddings)
    np.testing.assert_allclose(table.lookup(np.arange(ROWS)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS.keys())
def test_no_slot_average_or_weight_decay_of_the_models_optimizer_concerns_a_table(strategy, make):
    table = make_table(strategy)
    with strategy.scope():
        model = model_of(Embedding(table), make())
    model.fit(X, Y, batch_size=BATCH, validation_data=(X + 1000, Y), verbose=0)
    assert table.statistics().steps == STEPS
    assert all(200 not in each.shape for each in model.optimizer.variables)
    # Only training adds keys. All others have the default row, zeros.
    found = model.predict(X + 3000, batch_size=BATCH, verbose=0)
    np.testing.assert_array_equal(found, np.full_like(found, model.layers[-1].bias.numpy()[0]))
    assert table.size() == ROWS


@pytest.mark.long
def test_a_rule_gives_a_table_the_gradients_that_it_accepts(strategy):
    table = tables.make_table(strategy, initializer=Constant(0.0))
    with strategy.scope():
        variable = tf.Variable(tf.zeros([tables.DIM]))
        rule = Synchronous(keras.optimizers.SGD(1.0), [table.variable, variable], grads_to_wait=2)

    @tf.function
    def step():
        def body():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(table.lookup([1, 2, 2], training=True)) + tf.reduce_sum(variable)
            return loss, tape.gradient(loss, [table.variable, variable])

        return rule.run(body)

    for _ in range(2 * STEPS):
        strategy.schedule(step)
    strategy.join(TIMEOUT)
    accepted = rule.statistics().pushes - rule.statistics().rejected
    assert accepted >= 2 * STEPS
    np.testing.assert_allclose(table.lookup([1, 2]), [[-0.5 * accepted] * tables.DIM, [-1.0 * accepted] * tables.DIM])
    assert table.statistics().steps == accepted
    np.testing.assert_allclose(variable, np.full([tables.DIM], -1.0 * rule.statistics().updates))


def test_a_rule_may_be_given_no_gradient_of_a_table(strategy):
    table = tables.make_table(strategy)
    with strategy.scope():
        variable = tf.Variable(1.0)
        rule = Asynchronous(keras.optimizers.SGD(1.0), [variable, table.variable])

    @tf.function
    def step():
        with rule.pull() as version:
            pass
        return rule.push([tf.constant(1.0), None], version)

    assert strategy.schedule(step).result(TIMEOUT)
    assert (variable.numpy(), table.statistics().steps) == (0.0, 0)
