"""Tests of lookup tables and lookup layers, in every place of a program where they can be created and used."""

import contextlib
import copy
import itertools

import keras
import pytest
import tensorflow as tf

import coordinator
from tests.ps_strategy.every_worker import has_copies_on_workers, on_every_worker

WORKERS = 2
WORDS = ["a", "b", "other"]
PLACES = ["in scope", "outside", "in the dataset function"]


def make_table():
    initializer = tf.lookup.KeyValueTensorInitializer(tf.constant(["a", "b"]), tf.constant([1, 2], tf.int64))
    return tf.lookup.StaticHashTable(initializer, default_value=-1)


@tf.function
def firsts(iterators):
    return [next(iterator) for iterator in iterators]


@pytest.fixture
def growing_table(strategy, tmp_path):
    """A table of two words on the client, from a file that has a third word when workers come to read it."""
    file = tmp_path / "words.txt"
    file.write_text("a\nb\n")
    index = tf.lookup.TextFileIndex
    with strategy.scope():
        initializer = tf.lookup.TextFileInitializer(str(file), tf.string, index.WHOLE_LINE, tf.int64, index.LINE_NUMBER)
        table = tf.lookup.StaticHashTable(initializer, default_value=-1)
    file.write_text("a\nb\nc\n")
    return table


def test_a_table_created_in_the_scope_has_a_copy_on_each_worker(strategy, growing_table, tmp_path):  # rows 162, 163
    size = tf.function(growing_table.size)
    assert on_every_worker(strategy, size) == [3, 3]
    assert has_copies_on_workers(strategy, growing_table.resource_handle)
    # Created once: they do not read the file again, nor does a Python copy of the table.
    (tmp_path / "words.txt").write_text("a\n")
    assert on_every_worker(strategy, size) == [3, 3]
    copied = copy.copy(growing_table)
    assert on_every_worker(strategy, tf.function(copied.size)) == [3, 3]
    # It works on the client too.
    assert growing_table.size().numpy() == copied.size().numpy() == 2
    for lookup in (growing_table.lookup, tf.function(growing_table.lookup)):
        assert lookup(tf.constant(["a", "b", "c"])).numpy().tolist() == [0, 1, -1]


def lookups(strategy, make, place, is_ready):
    """Returns an iterator over what a table or layer finds in a pipeline."""
    with strategy.scope() if place == "in scope" else contextlib.nullcontext():
        made = make() if place != "in the dataset function" else None

    def make_dataset(_=None):
        lookup = made or make()
        return tf.data.Dataset.from_tensors(WORDS).map(getattr(lookup, "lookup", lookup))

    if is_ready:
        return iter(strategy.experimental_distribute_dataset(make_dataset()))
    with strategy.scope():
        return iter(strategy.experimental_distribute_datasets_from_function(make_dataset))


def make_layer():
    return keras.layers.StringLookup(vocabulary=["a", "b"])


def test_lookups_in_a_pipeline_work_wherever_table_and_pipeline_are_created(strategy):  # rows 164, 165, 166, 171
    # Outside of the scope of the strategy too.
    cases = [*itertools.product([make_table, make_layer], PLACES, ["function", "ready"])]
    iterators = [lookups(strategy, *case, form == "ready") for *case, form in cases]
    for found in on_every_worker(strategy, firsts, iterators):
        for case, words in zip(cases, found, strict=True):
            assert words.tolist() == ([1, 2, 0] if case[0] is make_layer else [1, 2, -1]), case


def test_lookups_in_a_step_may_be_inside_of_loops_branches_and_functions(strategy, growing_table):  # rows 165, 167
    with strategy.scope():
        layer = make_layer()
        initializer = tf.lookup.KeyValueTensorInitializer(tf.constant(["a", "b"]), tf.constant([0, 1], tf.int64))
        buckets = tf.lookup.StaticVocabularyTable(initializer, num_oov_buckets=1)

    def make_dataset(_):
        return tf.data.Dataset.from_tensors(["b", "c"]).map(growing_table.lookup)

    @tf.function
    def inner(word):
        return growing_table.lookup(word)

    @tf.function
    def step(iterator, word, words):
        found = tf.constant(0, tf.int64)
        for _ in tf.range(2):
            for repeats in tf.range(3):
                if repeats > 0:
                    found += inner(word)
        mapped = tf.map_fn(inner, tf.stack([word, word]), fn_output_signature=tf.int64)
        # The last table is created in the step.
        return found, mapped, next(iterator), layer(words), buckets.lookup(words), make_table().lookup(words)

    iterator = iter(strategy.experimental_distribute_datasets_from_function(make_dataset))
    for found, *arrays in on_every_worker(strategy, step, iterator, tf.constant("c"), tf.constant(WORDS)):
        assert found == 2 * 2 * 2
        assert [array.tolist() for array in arrays] == [[2, 2], [1, 2], [1, 2, 0], [0, 1, 2], [1, 2, -1]]


def test_a_function_traced_on_the_client_uses_each_workers_table(strategy, growing_table):  # row 168
    class Model(tf.Module):
        def __init__(self):
            self.table = growing_table

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
        def find(self, words):
            return self.table.lookup(words)

    model = Model()
    # Traced here, on the client, with the client's table.
    assert model.find(tf.constant(["b", "c"])).numpy().tolist() == [1, -1]
    for fn in (model.find, model.find.get_concrete_function()):
        found = strategy.schedule(fn, args=(tf.constant(["b", "c"]),)).result(60)
        assert found.tolist() == [1, 2]
    found = on_every_worker(strategy, tf.function(lambda: model.find(tf.constant(["b", "c"]))))
    assert [words.tolist() for words in found] == [[1, 2]] * WORKERS


def test_a_table_that_cannot_be_created_on_a_worker_is_an_input_error(strategy, growing_table, tmp_path):
    (tmp_path / "words.txt").unlink()
    future = strategy.schedule(tf.function(growing_table.size), worker=1)
    for wait in (future.result, strategy.join):
        with pytest.raises(coordinator.ClosureInputError, match="lookup table could not be created on /job:worker"):
            wait(120)
