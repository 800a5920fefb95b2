"""Tests of SavedModels of modules that were created under the strategy, loaded without it and under it."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.ps_strategy.every_worker import has_copies_on_workers, on_every_worker

WORKERS = 2
TIMEOUT = 60.0
WORDS = ["a", "b", "other"]
FOUND = [20.0, 30.0, 10.0]


@tf.function
def first(iterator):
    return next(iterator)


class WordValues(tf.Module):
    """A table and a variable: the value of each word, the first one for words that are not known."""

    def __init__(self):
        initializer = tf.lookup.KeyValueTensorInitializer(tf.constant(["a", "b"]), tf.constant([1, 2], tf.int64))
        self.table = tf.lookup.StaticHashTable(initializer, default_value=0)
        self.values = tf.Variable([10.0, 20.0, 30.0])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def look_up(self, words):
        return tf.gather(self.values, self.table.lookup(words))


@pytest.fixture
def saved(strategy, tmp_path):
    """The folder of a SavedModel with a table."""
    with strategy.scope():
        model = WordValues()
    tf.saved_model.save(model, str(tmp_path / "saved"))
    return str(tmp_path / "saved")


def load(strategy, folder):
    with strategy.scope():
        return tf.saved_model.load(folder)


def test_a_saved_model_with_tables_loads_outside_of_the_scope(strategy, saved):  # row 169
    model = tf.saved_model.load(saved)
    assert model.look_up(tf.constant(WORDS)).numpy().tolist() == FOUND
    assert "/job:chief" in model.values.device
    # Also on the workers, where it uses the client's table and the client's variable.
    found = on_every_worker(strategy, tf.function(lambda words: model.look_up(words) + 1), tf.constant(WORDS))
    assert [words.tolist() for words in found] == [[21.0, 31.0, 11.0]] * WORKERS


def test_a_saved_model_loads_under_the_strategy_with_a_table_on_each_worker(strategy, saved):  # row 169
    model = load(strategy, saved)
    assert "/job:ps" in model.values.device
    assert model.look_up(tf.constant(WORDS)).numpy().tolist() == FOUND

    found = on_every_worker(strategy, model.look_up, tf.constant(WORDS))
    assert [words.tolist() for words in found] == [FOUND] * WORKERS
    assert has_copies_on_workers(strategy, model.table.resource_handle)

    model.values.assign([0.0, 1.0, 2.0])
    for fn in (model.look_up, model.look_up.concrete_functions[0], model.signatures["serving_default"]):
        [found] = tf.nest.flatten(strategy.schedule(fn, kwargs={"words": tf.constant(WORDS)}).result(TIMEOUT))
        assert found.tolist() == [1.0, 2.0, 0.0]


def test_a_loaded_model_may_be_used_in_a_pipeline_and_inside_of_loops(strategy, saved):  # row 169
    model = load(strategy, saved)

    @tf.function
    def step(iterator):
        total = tf.zeros([3])
        for _ in range(2):
            total += next(iterator)
        for _ in tf.range(2):
            total += model.look_up(tf.constant(WORDS))
        return total

    def distribute(model):
        def make_dataset(_):
            return tf.data.Dataset.from_tensors(WORDS).repeat(2).map(model.look_up)

        return strategy.experimental_distribute_datasets_from_function(make_dataset)

    found = on_every_worker(strategy, step, iter(distribute(model)))
    assert [words.tolist() for words in found] == [[80.0, 120.0, 40.0]] * WORKERS
    # A pipeline works after its model was deleted.
    other = load(strategy, saved)
    dataset, reference = distribute(other), weakref.ref(other)
    del other
    gc.collect()
    assert reference() is None
    found = on_every_worker(strategy, first, iter(dataset))
    assert [words.tolist() for words in found] == [FOUND] * WORKERS


def test_a_saved_model_contains_the_vocabulary_file_of_its_table(strategy, tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("a\nb\n")
    index = tf.lookup.TextFileIndex
    initializer = tf.lookup.TextFileInitializer(str(file), tf.string, index.WHOLE_LINE, tf.int64, index.LINE_NUMBER)
    model = tf.Module()
    model.table = tf.lookup.StaticHashTable(initializer, default_value=-1)
    model.look_up = tf.function(model.table.lookup, input_signature=[tf.TensorSpec([None], tf.string)])
    tf.saved_model.save(model, str(tmp_path / "saved"))
    file.unlink()
    # Twice, so that the tables of one must not be mistaken for those of the other.
    for _ in range(2):
        found = on_every_worker(strategy, load(strategy, str(tmp_path / "saved")).look_up, tf.constant(WORDS))
        assert [words.tolist() for words in found] == [[0, 1, -1]] * WORKERS


@pytest.mark.long
def test_an_embedding_model_with_a_lookup_table_is_trained_saved_and_served(strategy, tmp_path):  # row 170
    words = tf.constant([["good", "fine", "nice", "good"], ["bad", "ugly", "poor", "poor"]])
    with strategy.scope():
        lookup = keras.layers.StringLookup(vocabulary=["good", "bad", "fine", "poor", "nice", "ugly"])
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="int64"),
                keras.layers.Embedding(lookup.vocabulary_size(), 4),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(1, activation="sigmoid"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy")

    def make_dataset(context):
        examples = tf.data.Dataset.from_tensor_slices((words, [[1.0], [0.0]])).repeat(30).batch(2)
        return examples.map(lambda words, label: (lookup(words), label))

    model.fit(make_dataset, steps_per_epoch=60, verbose=0)
    assert (model(lookup(words)).numpy() > 0.5).tolist() == [[True], [False]]

    inputs = keras.Input((4,), dtype="string")
    served = keras.Model(inputs, model(lookup(inputs)))
    served.export(str(tmp_path / "served"), verbose=False)
    expected = served(words).numpy()
    for loaded in (tf.saved_model.load(str(tmp_path / "served")), load(strategy, str(tmp_path / "served"))):
        np.testing.assert_allclose(loaded.serve(words).numpy(), expected, rtol=1e-5)
    for answer in on_every_worker(strategy, loaded.serve, words):
        np.testing.assert_allclose(answer, expected, rtol=1e-5)
