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
IDS = RANDOM.integers(0, ROWS, size=(64, 3))
LABELS = (IDS.sum(axis=1, keepdims=True) % 2).astype(np.float32)


def make_model(**embedding):
    """Returns a model in which every matrix and most vectors have several rows."""
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int64"),
            keras.layers.Embedding(ROWS, 4, name="table", **embedding),
            keras.layers.Flatten(),
            keras.layers.Dense(8, activation="relu", name="hidden"),
            keras.layers.Dense(1, name="output"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.fixture
def scope(sharded_scope):
    return lambda: sharded_scope(tf.distribute.experimental.partitioners.FixedShardsPartitioner(3))


def pair(scope, make):
    """Returns a sharded model and a plain one of the same weights."""
    with scope():
        model = make()
    plain = make()
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


def train(strategy, model, plain, steps=4):
    """Trains both on the same batches, one at a time, which have all rows of the table."""
    step, here = make_step(model), make_step(plain, is_dense=True)
    for _ in range(steps):
        ids = np.concatenate([RANDOM.permutation(ROWS), RANDOM.integers(0, ROWS, size=10)]).reshape([-1, 3])
        labels = RANDOM.normal(size=(len(ids), 1)).astype(np.float32)
        found = strategy.schedule(step, args=(ids, labels)).result(TIMEOUT)
        np.testing.assert_allclose(found, here(tf.constant(ids), tf.constant(labels)), rtol=1e-4)


def assert_equal_weights(model, plain):
    for variable, expected in zip(
        [*model.variables, *model.optimizer.variables], [*plain.variables, *plain.optimizer.variables], strict=True
    ):
        np.testing.assert_allclose(variable.numpy(), expected.numpy(), rtol=1e-4, atol=1e-5, err_msg=variable.path)


def test_layers_have_sharded_variables_and_one_step_at_a_time_is_as_in_one_process(strategy, scope):
    model, plain = pair(scope, make_model)
    parts = {each.path.partition("/")[2]: len(getattr(each.value, "variables", [1])) for each in model.variables}
    assert parts == {
        "table/embeddings": 3,
        "hidden/kernel": 3,
        "hidden/bias": 3,
        "output/kernel": 3,
        "output/bias": 1,
    }
    train(strategy, model, plain)
    assert_equal_weights(model, plain)


@pytest.mark.long
def test_fit_evaluate_and_predict_train_on_every_example_and_read_all_rows(scope):
    with scope():
        model = make_model()
    history = model.fit(IDS, LABELS, batch_size=8, epochs=12, verbose=0).history
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    assert int(model.optimizer.iterations) == 12 * 8
    plain = make_model()
    plain.set_weights(model.get_weights())
    np.testing.assert_allclose(model.predict(IDS, verbose=0), plain.predict(IDS, verbose=0), rtol=1e-4, atol=1e-6)
    found, expected = (each.evaluate(IDS, LABELS, verbose=0, return_dict=True) for each in (model, plain))
    assert found == pytest.approx(expected, rel=1e-4)


def test_weights_are_got_set_counted_and_printed_as_those_of_a_plain_model(scope):
    model, plain = pair(scope, make_model)
    weights = [np.full_like(weight, number) for number, weight in enumerate(model.get_weights())]
    model.set_weights(weights)
    for weight, expected in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert model.count_params() == plain.count_params() == ROWS * 4 + 12 * 8 + 8 + 8 + 1
    printed = []
    model.summary(print_fn=printed.append)
    assert "200" in "".join(printed)
    with pytest.raises(ValueError, match="shape"):
        model.layers[0].set_weights([np.zeros([ROWS + 1, 4])])


def test_regularizers_and_constraints_concern_the_whole_variable(strategy, scope):
    def make():
        return make_model(embeddings_regularizer="l2", embeddings_constraint=keras.constraints.MaxNorm(0.05, axis=0))

    model, plain = pair(scope, make)
    train(strategy, model, plain, steps=2)
    assert_equal_weights(model, plain)
    norms = np.linalg.norm(model.layers[0].get_weights()[0], axis=0)
    assert np.all(norms <= 0.05 + 1e-5)


def test_mixed_precision_computes_in_16_bits_and_stores_32(strategy, scope):
    with scope():
        table = keras.layers.Embedding(ROWS, 4, dtype="mixed_bfloat16")
        dense = keras.layers.Dense(3, dtype="mixed_bfloat16")
        dense.build((None, 4))
        table.build()
        optimizer = keras.optimizers.Adagrad(0.1)
        optimizer.build([*table.trainable_variables, *dense.trainable_variables])

    @tf.function
    def step(ids):
        variables = [*table.trainable_variables, *dense.trainable_variables]
        with tf.GradientTape() as tape:
            rows = table(ids)
            loss = tf.reduce_sum(tf.cast(dense(rows), tf.float32) ** 2)
        gradients = tape.gradient(loss, variables)
        assert isinstance(gradients[0], tf.IndexedSlices)
        optimizer.apply(gradients, variables)
        return tf.cast(rows, tf.float32)

    before = table.embeddings.numpy()
    rows = strategy.schedule(step, args=(np.array([49, 0, 20, 0]),)).result(TIMEOUT)
    np.testing.assert_allclose(rows, before[[49, 0, 20, 0]], rtol=1e-2)
    assert table.embeddings.dtype == "float32"
    changed = np.any(table.embeddings.numpy() != before, axis=1)
    assert np.flatnonzero(changed).tolist() == [0, 20, 49]


def test_negative_and_ragged_ids_are_looked_up_as_in_a_plain_layer(strategy, scope):
    weights = RANDOM.normal(size=(ROWS, 2)).astype(np.float32)
    with scope():
        layer = keras.layers.Embedding(ROWS, 2, weights=weights)
    ragged = tf.ragged.constant([[49, 0], [], [17]])
    step = tf.function(lambda ids: (layer(ids), layer(ragged).flat_values))
    rows, of_ragged = strategy.schedule(step, args=(np.array([[-1, 3], [0, -50]]),)).result(TIMEOUT)
    np.testing.assert_array_equal(rows, weights[np.array([[-1, 3], [0, -50]])])
    np.testing.assert_array_equal(of_ragged, weights[[49, 0, 17]])
