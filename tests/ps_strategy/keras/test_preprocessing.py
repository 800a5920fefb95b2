"""Tests of Keras' preprocessing layers in input pipelines and in steps, wherever they were adapted."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.ps_strategy.every_worker import has_copies_on_workers, on_every_worker

WORKERS = 3
TIMEOUT = 120.0

# Name -> the constructor, the data to adapt to, the input, the expected output.
ADAPTED = {
    "StringLookup": (keras.layers.StringLookup, ["b", "a", "b"], ["a", "b", "?"], [2, 1, 0]),
    "IntegerLookup": (keras.layers.IntegerLookup, [7, 9, 7], [9, 7, 1], [2, 1, 0]),
    "Normalization": (lambda: keras.layers.Normalization(axis=-1), [[1.0], [3.0]], [[2.0], [5.0]], [[0.0], [3.0]]),
    "TextVectorization": (keras.layers.TextVectorization, ["b a b"], ["a b c"], [[3, 2, 1]]),
    "Discretization": (lambda: keras.layers.Discretization(num_bins=2), [0.0, 1.0, 2.0, 3.0], [0.0, 3.0], [0, 1]),
}
AS_MADE = {
    "Hashing": (lambda: keras.layers.Hashing(num_bins=3, salt=[1, 2]), ["a", "b", "c", "d"]),
    "CategoryEncoding": (lambda: keras.layers.CategoryEncoding(3, output_mode="multi_hot"), [[0, 2], [1, 1]]),
    "a vocabulary": (lambda: keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot"), ["b", "?"]),
    "inverted": (lambda: keras.layers.StringLookup(vocabulary=["a", "b"], invert=True), [0, 2, 1]),
    "bins": (lambda: keras.layers.Discretization(bin_boundaries=[0.0, 1.0]), [-1.0, 0.5, 2.0]),
    "tf-idf": (
        lambda: keras.layers.TextVectorization(
            output_mode="tf_idf", vocabulary=["a", "b"], idf_weights=np.array([1.0, 2.0])
        ),
        ["b a c", "a a a"],
    ),
}


def found_by_workers(strategy, layers, features):
    """Returns the outputs of layers on each worker, by name: in its input pipeline, and in a step."""

    def apply(features):
        return {name: layer(features[name]) for name, layer in layers.items()}

    def make_dataset(_):
        return tf.data.Dataset.from_tensors(features).map(apply)

    @tf.function
    def step(iterator):
        return next(iterator), apply(features)

    iterator = iter(strategy.experimental_distribute_datasets_from_function(make_dataset))
    return [part for parts in on_every_worker(strategy, step, iterator) for part in parts]


@pytest.mark.long
@pytest.mark.parametrize(
    ("made", "adapted"),
    [
        ("in the scope", "in the scope"),
        ("outside", "outside"),
        ("in the scope", "outside"),
        ("outside", "in the scope"),
    ],
)
def test_adapted_layers_give_the_same_results_on_every_worker(strategy, made, adapted):  # rows 171 and 173
    with strategy.scope() if made == "in the scope" else contextlib.nullcontext():
        layers = {name: make() for name, (make, *_) in ADAPTED.items()}
    with strategy.scope() if adapted == "in the scope" else contextlib.nullcontext():
        for name, (_, examples, *_) in ADAPTED.items():
            layers[name].adapt(np.array(examples))
    features = {name: tf.constant(given) for name, (_, _, given, _) in ADAPTED.items()}
    found = found_by_workers(strategy, layers, features)
    assert len(found) == 2 * WORKERS
    for name, (*_, expected) in ADAPTED.items():
        np.testing.assert_allclose(layers[name](features[name]), expected, rtol=1e-6)
        for values in found:
            np.testing.assert_allclose(values[name], expected, rtol=1e-6, err_msg=name)


def test_layers_without_adapting_give_the_same_results_on_every_worker(strategy):  # rows 171 and 173
    features = {name: tf.constant(given) for name, (_, given) in AS_MADE.items()}
    with strategy.scope():
        layers = {name: make() for name, (make, _) in AS_MADE.items()}
    found = found_by_workers(strategy, layers, features)
    for name, (make, _) in AS_MADE.items():
        expected = make()(features[name]).numpy()
        for values in found:
            np.testing.assert_array_equal(values[name], expected, err_msg=name)


@pytest.mark.parametrize(
    "adapts", [True, pytest.param(False, marks=pytest.mark.long)], ids=["adapted", "made with a vocabulary"]
)
def test_the_table_of_a_layer_created_in_the_scope_is_on_every_worker(strategy, adapts):  # row 168
    with strategy.scope():
        layer = keras.layers.StringLookup(vocabulary=None if adapts else ["a", "b"])
        if adapts:
            layer.adapt(np.array(["b", "b", "a"]))
    model = keras.Sequential([keras.Input((1,), dtype="string"), layer])
    words = tf.constant([["a"], ["b"]])
    expected = [[2], [1]] if adapts else [[1], [2]]
    for values in on_every_worker(strategy, tf.function(model), words):
        assert values.tolist() == expected
    assert has_copies_on_workers(strategy, layer.lookup_table.resource_handle)


@pytest.mark.parametrize("layers", [keras.layers, tf_keras.layers], ids=["Keras 3", "Keras 2"])
def test_the_tables_that_count_while_a_layer_is_adapted_stay_on_the_client(strategy, layers, tmp_path):
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


def make_examples(context):
    """Returns examples: three names of heroes, and whether most of them are Marvel's."""

    def example(number):
        seed = tf.stack([number, tf.constant(context.input_pipeline_id, tf.int64)])
        chosen = tf.random.stateless_uniform([3], seed, 0, len(VOCABULARY), tf.int64)
        is_marvel = tf.reduce_sum(tf.gather(IS_MARVEL, chosen)) >= 2
        return {"features": tf.gather(VOCABULARY, chosen), "label": tf.where([is_marvel], "yes", "no")}

    return tf.data.Dataset.counter().map(example).batch(32)


class Training:
    """The model of the RFC, with the lookup of names in the pipeline or in the model; to be made in the scope."""

    def __init__(self, place):
        self.look_up = keras.layers.StringLookup(vocabulary=VOCABULARY, num_oov_indices=0)
        self.look_up_label = keras.layers.StringLookup(vocabulary=["no", "yes"], num_oov_indices=0)
        self.is_in_pipeline = place == "pipeline"
        inputs = keras.Input((3,), dtype="int64" if self.is_in_pipeline else "string")
        ids = inputs if self.is_in_pipeline else self.look_up(inputs)
        embedded = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(len(VOCABULARY), 8)(ids))
        self.model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(embedded))
        self.optimizer = keras.optimizers.RMSprop(0.05)
        self.accuracy = keras.metrics.BinaryAccuracy()
        self.evaluated = keras.metrics.BinaryAccuracy()

    def make_dataset(self, context):
        def prepare(example):
            features = example["features"]
            return self.look_up(features) if self.is_in_pipeline else features, self.look_up_label(example["label"])

        return make_examples(context).map(prepare)

    def step(self, iterator):
        features, labels = next(iterator)
        with tf.GradientTape() as tape:
            predicted = self.model(features, training=True)
            loss = tf.reduce_mean(keras.losses.binary_crossentropy(labels, predicted))
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.accuracy.update_state(labels, predicted)

    def evaluate(self, iterator):
        features, labels = next(iterator)
        self.evaluated.update_state(labels, self.model(features))


@pytest.mark.parametrize("place", ["pipeline", pytest.param("model", marks=pytest.mark.long)])
def test_the_example_of_the_rfc_trains_evaluates_and_counts(strategy, place):  # rows 170 and 173
    with strategy.scope():
        training = Training(place)
    step, evaluate = tf.function(training.step), tf.function(training.evaluate)
    iterator = iter(strategy.experimental_distribute_datasets_from_function(training.make_dataset))
    for _ in range(2):
        training.accuracy.reset_state()
        for _ in range(40):
            strategy.schedule(step, args=(iterator,))
        strategy.join(TIMEOUT)
        assert float(training.accuracy.count) == 40 * 32
    for _ in range(6):
        strategy.schedule(evaluate, args=(iterator,))
    strategy.join(TIMEOUT)
    assert float(training.evaluated.count) == 6 * 32
    assert float(training.evaluated.result()) > 0.8
    assert int(training.optimizer.iterations) == 80
