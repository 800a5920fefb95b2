"""Tests of Keras 3 models whose variables are sharded: layers, loops, weights, regularizers, constraints."""

import keras
import numpy as np
import pytest
import tensorflow as tf

# Warnings of Keras itself.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

TIMEOUT = 240.0
ROWS = 50
RANDOM = np.random.default_rng(0)
PARTITIONER = tf.distribute.experimental.partitioners.FixedShardsPartitioner(3)


def make_model(**embedding):
    """Returns a model in which every matrix and most vectors have several rows."""
    table = keras.layers.Embedding(ROWS, 4, name="table", **embedding)
    layers = [
        keras.layers.Flatten(),
        keras.layers.Dense(8, "relu", name="hidden"),
        keras.layers.Dense(1, name="output"),
    ]
    model = keras.Sequential([keras.Input((3,), dtype="int64"), table, *layers])
    model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


def pair(sharded_scope, **embedding):
    """Returns a sharded model and a plain one of the same weights."""
    with sharded_scope(PARTITIONER):
        model = make_model(**embedding)
    plain = make_model(**embedding)
    plain.set_weights(model.get_weights())
    return model, plain


def make_step(model, is_dense=False):
    @tf.function
    def step(ids, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(ids, training=True) - labels) ** 2) + sum(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        # Of rows of the same index Keras itself adds up the squares, not the square of the sum.
        gradients = [tf.convert_to_tensor(each) if is_dense else each for each in gradients]
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    return step


def assert_trained_equally(strategy, model, plain):
    """Trains both on the same batches, one at a time, which have all rows of the table."""
    step, here = make_step(model), make_step(plain, is_dense=True)
    for _ in range(3):
        ids = np.concatenate([RANDOM.permutation(ROWS), RANDOM.integers(0, ROWS, size=10)]).reshape([-1, 3])
        labels = RANDOM.normal(size=(len(ids), 1)).astype(np.float32)
        found = strategy.schedule(step, args=(ids, labels)).result(TIMEOUT)
        np.testing.assert_allclose(found, here(tf.constant(ids), tf.constant(labels)), rtol=1e-4)
    for variable, expected in zip(
        [*model.variables, *model.optimizer.variables], [*plain.variables, *plain.optimizer.variables], strict=True
    ):
        np.testing.assert_allclose(variable.numpy(), expected.numpy(), rtol=1e-4, atol=1e-5, err_msg=variable.path)


def test_layers_regularizers_and_constraints_are_as_in_one_process(strategy, sharded_scope):
    constraint = keras.constraints.MaxNorm(0.05, axis=0)
    model, plain = pair(sharded_scope, embeddings_regularizer="l2", embeddings_constraint=constraint)
    parts = {each.path.partition("/")[2]: len(getattr(each.value, "variables", [1])) for each in model.variables}
    names = ("table/embeddings", "hidden/kernel", "hidden/bias", "output/kernel")
    assert parts == {**dict.fromkeys(names, 3), "output/bias": 1}
    assert_trained_equally(strategy, model, plain)
    plain.set_weights(model.get_weights())
    ids = RANDOM.integers(0, ROWS, size=(64, 3))
    np.testing.assert_allclose(model.predict(ids, verbose=0), plain.predict(ids, verbose=0), rtol=1e-4, atol=1e-6)
    assert model.count_params() == plain.count_params()
    # The norms are of the whole variable.
    assert np.all(np.linalg.norm(model.layers[0].get_weights()[0], axis=0) <= 0.05 + 1e-5)
