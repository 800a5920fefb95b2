"""Tests of Keras 3 models whose variables are sharded: layers, `fit`, loops, weights, regularizers, constraints."""

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
    # The norms are of the whole variable.
    assert np.all(np.linalg.norm(model.layers[0].get_weights()[0], axis=0) <= 0.05 + 1e-5)


@pytest.mark.long
def test_fit_evaluate_and_predict_train_on_every_example_and_read_all_rows(sharded_scope):
    model, plain = pair(sharded_scope)
    ids = RANDOM.integers(0, ROWS, size=(64, 3))
    labels = (ids.sum(axis=1, keepdims=True) % 2).astype(np.float32)
    history = model.fit(ids, labels, batch_size=8, epochs=12, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    assert int(model.optimizer.iterations) == 12 * 8
    plain.set_weights(model.get_weights())
    np.testing.assert_allclose(model.predict(ids, verbose=0), plain.predict(ids, verbose=0), rtol=1e-4, atol=1e-6)
    found, expected = (each.evaluate(ids, labels, verbose=0, return_dict=True) for each in (model, plain))
    assert found == pytest.approx(expected, rel=1e-4)


def test_weights_are_got_set_counted_and_printed_as_those_of_a_plain_model(sharded_scope):
    model, plain = pair(sharded_scope)
    weights = [np.full_like(weight, number) for number, weight in enumerate(model.get_weights())]
    model.set_weights(weights)
    for weight, expected in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert model.count_params() == plain.count_params()
    printed = []
    model.summary(print_fn=printed.append)
    assert "200" in "".join(printed)
    with pytest.raises(ValueError, match="shape"):
        model.layers[0].set_weights([np.zeros([ROWS + 1, 4])])


def test_mixed_precision_computes_in_16_bits_and_stores_32(strategy, sharded_scope):
    with sharded_scope(PARTITIONER):
        table = keras.layers.Embedding(ROWS, 4, dtype="mixed_bfloat16")
        dense = keras.layers.Dense(3, dtype="mixed_bfloat16")
        dense.build((None, 4))
        table.build()
        optimizer = keras.optimizers.Adagrad(0.1)
        variables = [*table.trainable_variables, *dense.trainable_variables]
        optimizer.build(variables)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            rows = table(ids)
            loss = tf.reduce_sum(tf.cast(dense(rows), tf.float32) ** 2)
        gradients = tape.gradient(loss, variables)
        assert isinstance(gradients[0], tf.IndexedSlices)
        optimizer.apply(gradients, variables)
        return rows

    before = table.embeddings.numpy()
    rows = strategy.schedule(step, args=(np.array([49, 0, 20, 0]),)).result(TIMEOUT)
    assert (rows.dtype, table.embeddings.dtype) == ("bfloat16", "float32")
    np.testing.assert_allclose(rows.astype(np.float32), before[[49, 0, 20, 0]], rtol=1e-2)
    changed = np.any(table.embeddings.numpy() != before, axis=1)
    assert np.flatnonzero(changed).tolist() == [0, 20, 49]


def test_negative_and_ragged_ids_are_looked_up_as_in_a_plain_layer(strategy, sharded_scope):
    weights = RANDOM.normal(size=(ROWS, 2)).astype(np.float32)
    with sharded_scope(PARTITIONER):
        layer = keras.layers.Embedding(ROWS, 2, weights=weights)
    ragged = tf.ragged.constant([[49, 0], [], [17]])
    step = tf.function(lambda ids: (layer(ids), layer(ragged).flat_values))
    ids = np.array([[-1, 3], [0, -50]])
    rows, of_ragged = strategy.schedule(step, args=(ids,)).result(TIMEOUT)
    np.testing.assert_array_equal(rows, weights[ids])
    np.testing.assert_array_equal(of_ragged, weights[[49, 0, 17]])
