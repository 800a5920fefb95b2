"""Tests of the Keras layer of a table: kinds of keys, combiners, masks, shapes, and saving."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.embeddings import Embedding, Uniform
from coordinator.embeddings.table_settings import as_integers
from tests.embeddings.tables import DIM, TIMEOUT, Trainer, make_table

KEYS = [3, 10**15, -7]
RAGGED = tf.ragged.constant([[3, -7, 3], [], [10**15]], dtype=tf.int64)
WEIGHTS = tf.ragged.constant([[1.0, 2.0, 0.5], [], [4.0]])


@pytest.fixture(scope="module")
def table(shared_cluster, strategy):
    """A table with rows for `KEYS`, the strings in `test_strings_are_keys`, and 0 and 5."""
    table = make_table(strategy)
    Trainer(strategy, table).train([*KEYS, 0, 5, *as_integers(["a", ""]).numpy()])
    return table


def rows_of(table, keys):
    return table.lookup(tf.constant(keys)).numpy()


def test_keys_of_any_shape_are_replaced_by_their_rows(table):
    layer = Embedding(table)
    for keys in (
        5,
        [3, 5],
        [[3], [-7]],
        np.full([2, 0, 3], 3),
        np.int32([[3, 5]]),
        tf.constant([[[3, 999]]], tf.int64),
    ):
        found = layer(tf.constant(keys) if isinstance(keys, (int, list)) else keys)
        assert found.shape == (*np.shape(keys), DIM)
        np.testing.assert_array_equal(found, rows_of(table, keys))
    ragged = layer(RAGGED)
    assert ragged.to_list() == tf.ragged.constant([rows_of(table, [3, -7, 3]), [], rows_of(table, KEYS[1:2])]).to_list()


def test_a_snapshot_of_a_model_with_a_table_is_refused_before_copies_are_made(strategy, table):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,), dtype="int64"), Embedding(table, "sum"), keras.layers.Dense(1)])
    x, y = np.int64([[3], [5]]), np.zeros([2, 1], np.float32)
    error = [keras.metrics.MeanSquaredError()]
    made = []

    def creator(next_creator, **options):
        made.append(options["name"])
        return next_creator(**options)

    with (
        tf.variable_creator_scope(creator),
        pytest.raises(ValueError, match=f"cannot copy the rows of tables, and the model has {table.name!r}"),
    ):
        strategy.evaluate(model, (x, y), error, model_state="snapshot")
    assert not made
    found = strategy.evaluate(model, (x, y), error)
    assert found == pytest.approx({"mean_squared_error": np.mean(model(x).numpy() ** 2)}, rel=1e-5)


def test_strings_are_keys_and_zeros_may_pad(table):
    layer = Embedding(table, combiner="sum", mask_zero=True)
    a = rows_of(table, ["a"])
    np.testing.assert_array_equal(layer(tf.constant([["a", ""], ["", ""]])), np.concatenate([a, 0 * a]))
    np.testing.assert_array_equal(layer(tf.ragged.constant([["a", "a"], [""]])), np.concatenate([2 * a, 0 * a]))
    keys = tf.constant([[3, 0], [0, 0]])
    layer = Embedding(table, mask_zero=True)
    np.testing.assert_array_equal(layer.compute_mask(keys), [[True, False], [False, False]])
    pooled = keras.layers.GlobalAveragePooling1D()(layer(keys[:1]))
    np.testing.assert_allclose(pooled, rows_of(table, [3]), rtol=1e-6)
    mean = Embedding(table, combiner="mean", mask_zero=True)
    np.testing.assert_allclose(mean(keys), [*rows_of(table, [3]), np.zeros(DIM)], rtol=1e-6)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_a_combiner_does_what_embedding_lookup_sparse_does(table, combiner):
    layer = Embedding(table, combiner=combiner)
    unique = sorted({3, -7, 10**15})
    matrix = tf.constant(rows_of(table, unique))
    for weights in (None, WEIGHTS):
        positions = RAGGED.with_values(tf.searchsorted(unique, RAGGED.values))
        sparse = None if weights is None else weights.to_sparse()
        # It leaves the last rows out if they are empty; here an empty one is between others.
        expected = tf.nn.embedding_lookup_sparse(matrix, positions.to_sparse(), sparse, combiner=combiner)
        np.testing.assert_allclose(layer(RAGGED, weights=weights), expected, rtol=1e-6)
        np.testing.assert_allclose(layer(RAGGED.to_sparse(), weights=sparse), expected, rtol=1e-6)
    nested = tf.RaggedTensor.from_row_lengths(RAGGED, [2, 0, 1])
    assert layer(nested).shape.as_list() == [3, None, DIM]
    np.testing.assert_allclose(layer(nested).values, layer(RAGGED))
    dense = tf.constant([[3, 3], [5, 0]])
    np.testing.assert_allclose(layer(dense), layer(tf.RaggedTensor.from_tensor(dense)), rtol=1e-6)


def test_symbolic_shapes_are_those_of_the_results(table):
    for combiner, kind, expected in (
        (None, {}, (None, 5, DIM)),
        (None, {"ragged": True}, (None, 5, DIM)),
        ("mean", {}, (None, DIM)),
        ("mean", {"sparse": True}, (None, DIM)),
        ("mean", {"ragged": True}, (None, DIM)),
    ):
        inputs = keras.Input((5,), dtype="int64", **kind)
        output = Embedding(table, combiner)(inputs)
        assert output.shape == expected
        assert output.ragged == (combiner is None and "ragged" in kind)
    assert Embedding(table, dtype="mixed_bfloat16")(tf.constant([3])).dtype == tf.bfloat16


def test_wrong_keys_and_combiners_are_refused_with_advice(table):
    with pytest.raises(ValueError, match="combiner must be one of 'sum', 'mean', 'sqrtn' or None, got 'max'"):
        Embedding(table, combiner="max")
    with pytest.raises(TypeError, match=r"must be int64, int32 or strings, got float32\. Give keras.Input dtype="):
        Embedding(table)(keras.Input((3,)))
    with pytest.raises(ValueError, match="Sparse keys need a combiner"):
        Embedding(table)(RAGGED.to_sparse())
    with pytest.raises(ValueError, match="Weights of keys need a combiner"):
        Embedding(table)(RAGGED, weights=WEIGHTS)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_saved_model_needs_its_table_by_name(table, strategy, tmp_path):
    with strategy.scope():
        layers = [Embedding(table, "sum", name="words"), Embedding(table, "mean", name="others")]
        inputs = keras.Input((2,), dtype="int64")
        model = keras.Model([inputs], keras.layers.Dense(1)(layers[0](inputs) + layers[1](inputs)))
    # Both have one variable, which has no values.
    assert [each.shape for each in model.trainable_variables] == [(1000, DIM), (DIM, 1), (1,)]
    with pytest.raises(NotImplementedError, match="cannot be read as a whole"):
        layers[0].get_weights()
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(ValueError, match="needs the table 'words', which is not saved"):
        keras.models.load_model(tmp_path / "model.keras")
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects={"words": table, "others": table})
    keys = [np.array([KEYS[:2]])]
    np.testing.assert_array_equal(loaded(keys), model(keys))
    loaded.load_weights(tmp_path / "model.weights.h5")
    saved = tf.train.Checkpoint(model=model).write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(model=loaded).read(saved).assert_existing_objects_matched()


def test_a_loop_trains_the_keys_that_a_tape_sees(strategy):
    table = make_table(strategy)
    with strategy.scope():
        layer = Embedding(table, combiner="sum")
        weight = keras.Variable(np.ones([DIM, 1], np.float32))
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build([weight, layer.rows])

    @tf.function
    def step(keys):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(keys) @ weight) + tf.reduce_sum(layer(keys + 100, training=False))
        optimizer.apply(tape.gradient(loss, [weight, layer.rows]), [weight, layer.rows])
        return layer(keys + 200)

    found = strategy.schedule(step, args=(tf.constant([[3, 4], [3, 3]], tf.int64),)).result(TIMEOUT)
    # Neither without a tape nor with training=False does a key get a row.
    assert table.size() == 2
    np.testing.assert_array_equal(found, np.zeros([2, DIM]))
    # The update function of the table subtracts half of the gradient, whatever the model's optimizer does.
    initial = Uniform()(tf.constant([3, 4], tf.int64), DIM)
    np.testing.assert_allclose(table.lookup(np.array([3, 4])), initial - [[1.5] * DIM, [0.5] * DIM], rtol=1e-6)
    np.testing.assert_allclose(weight, np.full([DIM, 1], 0.9), atol=1e-3)
    layer.trainable = False
    with tf.GradientTape():
        layer(tf.constant([[5]], tf.int64))
    assert table.size() == 2
