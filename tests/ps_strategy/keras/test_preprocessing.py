"""Tests of Keras' preprocessing layers in input pipelines and in steps, wherever they were adapted."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.ps_strategy.every_worker import has_copies_on_workers, on_every_worker

TIMEOUT = 120.0

# Name -> the constructor, the data to adapt to or None, the input.
LAYERS = {
    "StringLookup": (keras.layers.StringLookup, ["b", "a", "b"], ["a", "b", "?"]),
    "IntegerLookup": (keras.layers.IntegerLookup, [7, 9, 7], [9, 7, 1]),
    "Normalization": (lambda: keras.layers.Normalization(axis=-1), [[1.0], [3.0]], [[2.0], [5.0]]),
    "TextVectorization": (keras.layers.TextVectorization, ["b a b"], ["a b c"]),
    "Discretization": (lambda: keras.layers.Discretization(num_bins=2), [0.0, 1.0, 2.0, 3.0], [0.0, 3.0]),
    "Hashing": (lambda: keras.layers.Hashing(num_bins=3, salt=[1, 2]), None, ["a", "b", "c", "d"]),
    "CategoryEncoding": (lambda: keras.layers.CategoryEncoding(3, output_mode="multi_hot"), None, [[0, 2], [1, 1]]),
    "a vocabulary": (lambda: keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot"), None, ["b", "?"]),
    "inverted": (lambda: keras.layers.StringLookup(vocabulary=["a", "b"], invert=True), None, [0, 2, 1]),
}


def assert_found_by_workers(strategy, layers, features, expected):
    """Asserts the outputs of layers on each worker, by name: in its input pipeline, and in a step."""

    def apply(features):
        return {name: layer(features[name]) for name, layer in layers.items()}

    @tf.function
    def step(iterator):
        return next(iterator), apply(features)

    iterator = iter(
        strategy.experimental_distribute_datasets_from_function(
            lambda _: tf.data.Dataset.from_tensors(features).map(apply)
        )
    )
    for found in on_every_worker(strategy, step, iterator):
        for part in found:
            for name, value in expected.items():
                if name == "inverted":
                    np.testing.assert_array_equal(part[name], value)
                else:
                    np.testing.assert_allclose(part[name], value, rtol=1e-6, err_msg=name)


def made_layers():
    layers = {name: make() for name, (make, *_) in LAYERS.items()}
    for name, (_, examples, _) in LAYERS.items():
        if examples is not None:
            layers[name].adapt(np.array(examples))
    return layers


@pytest.mark.parametrize("where", ["in the scope", "outside"])
def test_layers_give_the_same_results_on_every_worker(strategy, where):  # rows 171 and 173
    features = {name: tf.constant(given) for name, (*_, given) in LAYERS.items()}
    with strategy.scope() if where == "in the scope" else contextlib.nullcontext():
        layers = made_layers()
    expected = {name: layer(features[name]).numpy() for name, layer in made_layers().items()}
    assert_found_by_workers(strategy, layers, features, expected)


def test_the_table_of_a_layer_created_in_the_scope_is_on_every_worker(strategy):  # row 168
    with strategy.scope():
        layer = keras.layers.StringLookup()
        layer.adapt(np.array(["b", "b", "a"]))
    model = keras.Sequential([keras.Input((1,), dtype="string"), layer])
    for values in on_every_worker(strategy, tf.function(model), tf.constant([["a"], ["b"]])):
        assert values.tolist() == [[2], [1]]
    assert has_copies_on_workers(strategy, layer.lookup_table.resource_handle)


def test_the_tables_that_count_while_a_layer_is_adapted_stay_on_the_client(strategy, tmp_path):
    for layers in (keras.layers, tf_keras.layers):
        with strategy.scope():
            layer, restored = (layers.StringLookup(output_mode="tf_idf") for _ in range(2))
        tables = [layer.token_counts, layer.token_document_counts]
        assert all("/job:chief" in table.resource_handle.device for table in tables)
        layer.update_state(tf.constant([["b", "b", "a"]]))
        path = tf.train.Checkpoint(counts=layer.token_counts).write(str(tmp_path / "counts"))
        tf.train.Checkpoint(counts=restored.token_counts).read(path).assert_consumed()
        assert restored.token_counts.lookup(tf.constant(["a", "b"])).numpy().tolist() == [1, 2]


VOCABULARY = ["avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman"]
IS_MARVEL = [1, 1, 0, 1, 1, 0, 0]


def hero_names(context):
    """Returns batches of three names of heroes, and whether most of them are Marvel's."""

    def example(number):
        seed = tf.stack([number, tf.constant(context.input_pipeline_id, tf.int64)])
        chosen = tf.random.stateless_uniform([3], seed, 0, len(VOCABULARY), tf.int64)
        is_marvel = tf.reduce_sum(tf.gather(IS_MARVEL, chosen)) >= 2
        return tf.gather(VOCABULARY, chosen), tf.where([is_marvel], "yes", "no")

    return tf.data.Dataset.counter().map(example).batch(32)


def test_the_example_of_the_rfc_trains_evaluates_and_counts(strategy):  # rows 170 and 173
    with strategy.scope():
        look_up = keras.layers.StringLookup(vocabulary=VOCABULARY, num_oov_indices=0)
        look_up_label = keras.layers.StringLookup(vocabulary=["no", "yes"], num_oov_indices=0)
        inputs = keras.Input((3,), dtype="int64")
        embedding, pooling = keras.layers.Embedding(len(VOCABULARY), 8), keras.layers.GlobalAveragePooling1D()
        model = keras.Sequential([inputs, embedding, pooling, keras.layers.Dense(1, activation="sigmoid")])
        optimizer = keras.optimizers.SGD(1.0)
        loss, accuracy = keras.metrics.Mean(), keras.metrics.BinaryAccuracy()

    def prepare(names, label):
        return look_up(names), look_up_label(label)

    @tf.function
    def step(iterator):
        features, labels = next(iterator)
        with tf.GradientTape() as tape:
            error = tf.reduce_mean(keras.losses.binary_crossentropy(labels, model(features, training=True)))
        optimizer.apply(tape.gradient(error, model.trainable_variables), model.trainable_variables)
        loss.update_state(error)

    @tf.function
    def evaluate(iterator):
        features, labels = next(iterator)
        accuracy.update_state(labels, model(features))

    iterator = iter(strategy.distribute_datasets_from_function(lambda context: hero_names(context).map(prepare)))

    def run(fn, steps):
        for _ in range(steps):
            strategy.schedule(fn, args=(iterator,))
        strategy.join(TIMEOUT)
        return float(loss.result())

    # The second one is the mean of both rounds.
    assert run(step, 20) > run(step, 20)
    assert (int(loss.count), int(optimizer.iterations)) == (40, 40)
    run(evaluate, 6)
    assert float(accuracy.count) == 6 * 32
