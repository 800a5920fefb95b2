"""Tests of lookup tables and lookup layers, in every place of a program where they can be created and used."""

import copy

import keras
import pytest
import tensorflow as tf

import coordinator
from tests.ps_strategy.every_worker import has_copies_on_workers, on_every_worker, per_worker_handles

WORKERS = 3
WORDS = ["a", "b", "other"]
FOUND = [1, 2, -1]


def make_table():
    initializer = tf.lookup.KeyValueTensorInitializer(tf.constant(["a", "b"]), tf.constant([1, 2], tf.int64))
    return tf.lookup.StaticHashTable(initializer, default_value=-1)


@tf.function
def first(iterator):
    return next(iterator)


@pytest.fixture
def table(strategy):
    with strategy.scope():
        return make_table()


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


@pytest.mark.long
def test_a_table_created_in_the_scope_has_a_copy_on_each_worker(strategy, growing_table, tmp_path):  # row 162
    size = tf.function(growing_table.size)
    assert growing_table.size().numpy() == 2
    assert on_every_worker(strategy, size) == [3, 3, 3]
    # Created once: they do not read the file again.
    (tmp_path / "words.txt").write_text("a\n")
    assert on_every_worker(strategy, size) == [3, 3, 3]
    assert growing_table.size().numpy() == 2


def test_a_table_created_in_the_scope_works_on_the_client(table):  # row 162
    assert table.size().numpy() == 2
    assert table.lookup(tf.constant(WORDS)).numpy().tolist() == FOUND
    assert tf.function(table.lookup)(tf.constant(WORDS)).numpy().tolist() == FOUND
    assert (table.key_dtype, table.value_dtype) == (tf.string, tf.int64)


def test_the_tables_are_on_the_workers(strategy, table):  # row 162
    on_every_worker(strategy, tf.function(table.size))
    assert has_copies_on_workers(strategy, table.resource_handle)


def test_a_python_copy_of_a_table_refers_to_the_same_tables(strategy, growing_table):  # row 163
    made_before = set(map(id, per_worker_handles(strategy).handles_of_copies))
    copied = copy.copy(growing_table)
    assert on_every_worker(strategy, tf.function(copied.size)) == [3, 3, 3]
    assert copied.size().numpy() == 2
    # Those of other tests may go meanwhile.
    assert set(map(id, per_worker_handles(strategy).handles_of_copies)) <= made_before


@pytest.mark.parametrize("dataset_form", ["function", "ready"])
@pytest.mark.parametrize(
    "dataset_scope",
    [pytest.param(True, id="dataset in scope"), pytest.param(False, id="dataset outside", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("table_place", ["in scope", "outside", "in the dataset function"])
@pytest.mark.parametrize("use", ["map", "directly"])
def test_lookups_in_a_pipeline_work_wherever_table_and_pipeline_are_created(  # rows 164, 165, 166
    strategy, dataset_form, dataset_scope, table_place, use
):
    with strategy.scope() if table_place == "in scope" else tf.device(None):
        made = make_table() if table_place != "in the dataset function" else None

    def make_dataset(_=None):
        table = made or make_table()
        if use == "map":
            return tf.data.Dataset.from_tensors(WORDS).map(table.lookup)
        return tf.data.Dataset.from_tensors(table.lookup(tf.constant(WORDS)))

    with strategy.scope() if dataset_scope else tf.device(None):
        if dataset_form == "ready":
            dataset = strategy.experimental_distribute_dataset(make_dataset())
        else:
            dataset = strategy.experimental_distribute_datasets_from_function(make_dataset)
    found = [found.tolist() for found in on_every_worker(strategy, first, iter(dataset))]
    assert found == [FOUND] * WORKERS


def test_a_pipeline_created_in_a_function_uses_the_workers_table(strategy, growing_table):  # row 165
    def make_dataset(_):
        return tf.data.Dataset.from_tensors(["b", "c"]).map(growing_table.lookup)

    iterator = iter(strategy.experimental_distribute_datasets_from_function(make_dataset))
    assert [found.tolist() for found in on_every_worker(strategy, first, iterator)] == [[1, 2]] * WORKERS


def test_a_table_created_in_a_step_works(strategy):
    @tf.function
    def step(words):
        return make_table().lookup(words)

    for _ in range(2):
        found = on_every_worker(strategy, step, tf.constant(WORDS))
        assert [words.tolist() for words in found] == [FOUND] * WORKERS


def test_lookups_in_a_step_may_be_inside_of_loops_branches_and_functions(strategy, growing_table):  # row 167
    @tf.function
    def inner(word):
        return growing_table.lookup(word)

    @tf.function
    def step(word):
        found = tf.constant(0, tf.int64)
        for _ in tf.range(2):
            for repeats in tf.range(3):
                if repeats > 0:
                    found += inner(word)
        return found, tf.map_fn(inner, tf.stack([word, word]), fn_output_signature=tf.int64)

    for found, mapped in on_every_worker(strategy, step, tf.constant("c")):
        assert found == 2 * 2 * 2
        assert mapped.tolist() == [2, 2]


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


def test_a_table_with_out_of_vocabulary_buckets_works(strategy):
    initializer = tf.lookup.KeyValueTensorInitializer(tf.constant(["a", "b"]), tf.constant([0, 1], tf.int64))
    with strategy.scope():
        table = tf.lookup.StaticVocabularyTable(initializer, num_oov_buckets=1)
    found = on_every_worker(strategy, tf.function(table.lookup), tf.constant(WORDS))
    assert [words.tolist() for words in found] == [[0, 1, 2]] * WORKERS


def test_a_table_that_cannot_be_created_on_a_worker_is_an_input_error(strategy, growing_table, tmp_path):
    (tmp_path / "words.txt").unlink()
    with pytest.raises(coordinator.ClosureInputError, match="lookup table could not be created on /job:worker"):
        strategy.schedule(tf.function(growing_table.size), worker=1).result(120)
    with pytest.raises(coordinator.ClosureInputError, match="lookup table could not be created on /job:worker"):
        strategy.join(120)


def make_lookup():
    return keras.layers.StringLookup(vocabulary=["a", "b"])


@pytest.mark.parametrize("layer_place", ["in scope", "outside", "in the dataset function"])
@pytest.mark.parametrize("dataset_form", ["function", "ready"])
def test_lookup_layers_work_in_a_pipeline(strategy, layer_place, dataset_form):  # row 171
    with strategy.scope() if layer_place == "in scope" else tf.device(None):
        made = make_lookup() if layer_place != "in the dataset function" else None

    def make_dataset(_=None):
        return tf.data.Dataset.from_tensors(WORDS).map(made or make_lookup())

    if dataset_form == "ready":
        dataset = strategy.experimental_distribute_dataset(make_dataset())
    else:
        dataset = strategy.experimental_distribute_datasets_from_function(make_dataset)
    found = on_every_worker(strategy, first, iter(dataset))
    assert [words.tolist() for words in found] == [[1, 2, 0]] * WORKERS


def test_a_lookup_layer_works_in_a_step(strategy):
    with strategy.scope():
        layer = make_lookup()
    found = on_every_worker(strategy, tf.function(layer), tf.constant(WORDS))
    assert [words.tolist() for words in found] == [[1, 2, 0]] * WORKERS


@pytest.mark.parametrize(
    ("make_layer", "features", "expected"),
    [
        (lambda: keras.layers.TextVectorization(vocabulary=["a", "b"]), ["b a c"], [[3, 2, 1]]),
        (lambda: keras.layers.IntegerLookup(vocabulary=[7, 9]), [9, 7, 1], [2, 1, 0]),
        (lambda: keras.layers.Normalization(mean=1.0, variance=4.0), [1.0, 3.0], [0.0, 1.0]),
        (lambda: keras.layers.Discretization(bin_boundaries=[0.0, 1.0]), [-1.0, 0.5, 2.0], [0, 1, 2]),
        (lambda: keras.layers.CategoryEncoding(3, output_mode="one_hot"), [2, 0], [[0, 0, 1], [1, 0, 0]]),
    ],
    ids=["TextVectorization", "IntegerLookup", "Normalization", "Discretization", "CategoryEncoding"],
)
def test_preprocessing_layers_work_in_a_pipeline(strategy, make_layer, features, expected):  # row 171
    with strategy.scope():
        layer = make_layer()

    def make_dataset(_):
        return tf.data.Dataset.from_tensors(features).map(layer)

    iterator = iter(strategy.experimental_distribute_datasets_from_function(make_dataset))
    assert [found.tolist() for found in on_every_worker(strategy, first, iterator)] == [expected] * WORKERS
