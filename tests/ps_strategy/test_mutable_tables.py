"""Tests of `MutableHashTable` and `DenseHashTable`: created in the scope, they are on the parameter servers."""

import gc
import weakref

import pytest
import tensorflow as tf

import coordinator
from coordinator.ps_strategy.recovery.variable_store import VariableStore
from tests.ps_strategy.every_worker import on_every_worker
from tests.ps_strategy.fusing.fused_calls import COUNT, STEPS, FusedCalls

WORKERS = 2
TIMEOUT = 60.0
SERVERS = ["/job:ps/replica:0/task:0/device:CPU:0", "/job:ps/replica:0/task:1/device:CPU:0"]
WORDS = ["a", "b", "other"]


def make_words(**kwargs):
    return tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, default_value=-1, **kwargs)


def make_vectors(**kwargs):
    return tf.lookup.experimental.DenseHashTable(
        tf.int64, tf.float32, [0.0, 0.0], empty_key=-1, deleted_key=-2, initial_num_buckets=64, **kwargs
    )


def content_of(table):
    """Returns the entries of a table, as a dict."""
    keys, values = (part.numpy() for part in table.export())
    entries = zip(keys.flatten().tolist(), values.tolist(), strict=True)
    return {key: value for key, value in entries if key not in (-1, -2)}


@pytest.fixture
def words(strategy):
    with strategy.scope():
        table = make_words()
    table.insert(tf.constant(["a", "b"]), tf.constant([1, 2], tf.int64))
    return table


@pytest.fixture
def vectors(strategy):
    with strategy.scope():
        table = make_vectors()
    table.insert(tf.constant([7], tf.int64), tf.constant([[1.0, 2.0]]))
    return table


@pytest.fixture
def store(strategy, monkeypatch, recorded_functions) -> VariableStore:
    store = VariableStore(recorded_functions)
    monkeypatch.setattr(strategy.extended, "_variables", store)
    return store


def test_tables_go_round_robin_over_the_parameter_servers_with_the_variables(strategy):
    with strategy.scope(), tf.device("/job:worker/replica:0/task:0"):
        anonymous = make_words(experimental_is_anonymous=True)
        made = [anonymous, tf.Variable(0), make_words(), make_vectors(), tf.Variable(0)]
    devices = [each.device if isinstance(each, tf.Variable) else each.resource_handle.device for each in made]
    first = SERVERS.index(devices[0])
    assert devices == [SERVERS[(first + number) % 2] for number in range(5)]
    assert "/job:chief" in make_words().resource_handle.device


def test_all_workers_and_the_client_use_the_same_table(strategy, words, vectors):
    @tf.function
    def own_entries():
        index = coordinator.get_current_worker_index()
        word = tf.strings.as_string(index)
        words.insert([word, "gone " + word], [index, index])
        words.remove(tf.stack(["gone " + word]))
        vectors.insert([index], [[tf.cast(index, tf.float32)] * 2])

    on_every_worker(strategy, own_entries)
    assert content_of(words) == {b"a": 1, b"b": 2, b"0": 0, b"1": 1}
    assert content_of(vectors) == {7: [1.0, 2.0], 0: [0.0, 0.0], 1: [1.0, 1.0]}

    uses = {
        "look up": (lambda: words.lookup(tf.constant(WORDS)), [1, 2, -1]),
        "another default": (lambda: words.lookup(tf.constant(["?"]), tf.constant([5], tf.int64)), [5]),
        "vectors": (lambda: vectors.lookup(tf.constant([1, 7, 8], tf.int64)), [[1.0, 1.0], [1.0, 2.0], [0.0, 0.0]]),
        "size": (words.size, 4),
        "export": (lambda: tf.sort(words.export()[1]), [0, 1, 1, 2]),
    }
    use_all = tf.function(lambda: {name: use() for name, (use, _) in uses.items()})
    on_client = [
        tf.nest.map_structure(lambda value: value.numpy(), use()) for use in (use_all, use_all.python_function)
    ]
    for found in (*on_every_worker(strategy, use_all), *on_client):
        assert {name: value.tolist() for name, value in found.items()} == {
            name: each for name, (_, each) in uses.items()
        }
    words.remove(tf.constant(["a"]))
    vectors.erase(tf.constant([7], tf.int64))
    assert (words.size().numpy(), 7 in content_of(vectors)) == (3, False)


def test_no_insertion_of_racing_workers_is_lost(strategy, words, vectors, monkeypatch):
    @tf.function
    def insert(number):
        words.insert(tf.strings.as_string([number]), [number])
        vectors.insert([number], [[1.0, tf.cast(number, tf.float32)]])
        return words.lookup(tf.strings.as_string([number])), vectors.lookup([number])

    calls = [(tf.constant(number, tf.int64),) for number in range(100, 100 + 2 * COUNT)]
    fused = FusedCalls(strategy, monkeypatch)
    futures = fused.run(insert, calls)
    assert STEPS in fused.sizes
    for (number,), future in zip(calls, futures, strict=True):
        found, vector = future.result(TIMEOUT)
        assert (found.tolist(), vector.tolist()) == ([number], [[1.0, float(number)]])
    assert len(content_of(words)) == 2 + len(calls)
    assert len(content_of(vectors)) == 1 + len(calls)


def test_loops_branches_functions_and_datasets_use_the_table(strategy, words):
    inner = tf.function(lambda word: tf.ensure_shape(words.lookup([word]), [1]))

    def looked_up(_=None):
        return tf.data.Dataset.from_tensors(WORDS).map(words.lookup)

    @tf.function
    def step():
        found = tf.zeros([1], tf.int64)
        for number in tf.range(3):
            if number > 0:
                found += inner("b")
        return found, looked_up().reduce(tf.zeros([3], tf.int64), lambda _, values: tf.ensure_shape(values, [3]))

    found, mapped = strategy.schedule(step).result(TIMEOUT)
    assert (found.tolist(), mapped.tolist()) == ([4], [1, 2, -1])
    iterator = iter(strategy.experimental_distribute_datasets_from_function(looked_up))
    found = on_every_worker(strategy, tf.function(lambda each: next(each)), iterator)  # noqa: PLW0108
    assert [values.tolist() for values in found] == [[1, 2, -1]] * WORKERS
    with pytest.raises(ValueError, match="cannot be sent to the workers"):
        strategy.experimental_distribute_dataset(looked_up())


def test_tables_are_saved_and_restored(strategy, words, vectors, tmp_path):
    path = tf.train.Checkpoint(words=words, vectors=vectors).save(str(tmp_path / "saved"))
    saved = content_of(words), content_of(vectors)
    words.insert(tf.constant(["later"]), tf.constant([9], tf.int64))
    vectors.erase(tf.constant([7], tf.int64))
    with strategy.scope():
        # In another order, so on other servers.
        others = make_vectors(), make_words()
    local = make_vectors(), make_words()
    for restored_vectors, restored_words in [(vectors, words), others, local]:
        restored = tf.train.Checkpoint(words=restored_words, vectors=restored_vectors)
        restored.restore(path).assert_consumed()
        assert (content_of(restored_words), content_of(restored_vectors)) == saved


def test_a_saved_model_has_the_content_of_its_table(strategy, words, tmp_path):
    module = tf.Module()
    module.words, module.again = words, words
    module.find = tf.function(words.lookup, input_signature=[tf.TensorSpec([None], tf.string)])
    tf.saved_model.save(module, str(tmp_path))
    for scope in (strategy.scope(), tf.device(None)):
        with scope:
            loaded = tf.saved_model.load(str(tmp_path))
        assert loaded.find(tf.constant(WORDS)).numpy().tolist() == [1, 2, -1]
        assert strategy.schedule(loaded.find, args=(tf.constant(WORDS),)).result(TIMEOUT).tolist() == [1, 2, -1]


def test_a_recreated_table_has_its_initial_content_and_no_function_is_retraced(strategy, store, words, vectors):
    traces = []

    @tf.function
    def step(word):
        traces.append(word)
        words.insert([word], tf.constant([9], tf.int64))
        return words.size()

    initial = content_of(words)
    assert step(tf.constant("early")) == 3
    words.remove(tf.constant(["early"]))
    store.note_tables()
    vectors.erase(tf.constant([7], tf.int64))
    for _ in range(2):
        assert strategy.schedule(step, args=(tf.constant("later"),)).result(TIMEOUT) == 3
        assert step(tf.constant("late")) == 4
        store.renew()
        assert content_of(words) == initial
        assert content_of(vectors) == {7: [1.0, 2.0]}
        store.initialize_rest()
        # What is in the tables later is not their initial content.
        words.insert(tf.constant(["trained"]), tf.constant([3], tf.int64))
        store.note_tables()
        words.remove(tf.constant(["trained"]))
    assert len(traces) == 1


def test_a_table_that_was_not_noted_is_empty_when_it_is_recreated(store, words, vectors, tmp_path):
    path = tf.train.Checkpoint(vectors=vectors).write(str(tmp_path / "saved"))
    store.renew()
    assert (content_of(words), content_of(vectors)) == ({}, {})
    tf.train.Checkpoint(vectors=vectors).read(path).assert_consumed()
    assert content_of(vectors) == {7: [1.0, 2.0]}


def test_too_much_content_is_not_copied_which_is_logged(store, words, vectors, monkeypatch, caplog):
    monkeypatch.setattr("coordinator.ps_strategy.recovery.variable_store._MOST_ENTRIES", 1)
    store.note_tables()
    store.renew()
    store.initialize_rest()
    assert (content_of(words), content_of(vectors)) == ({}, {7: [1.0, 2.0]})
    [message] = caplog.messages
    assert "The table 'MutableHashTable' is not in the checkpoint" in message
    caplog.clear()
    words.insert(tf.constant(["a"]), tf.constant([1], tf.int64))
    store.initialize_rest()
    assert not caplog.messages


def test_what_a_deleted_table_holds_on_its_server_is_freed(strategy, store):
    with strategy.scope():
        table = make_words()
    table.insert(tf.constant(["a"]), tf.constant([1], tf.int64))
    resource, reference = store.resource_of(table), weakref.ref(table)
    del table
    gc.collect()
    assert reference() is None
    assert store.tables() == []
    with strategy.scope():
        make_words()
    size = tf.raw_ops.LookupTableSizeV2(table_handle=resource.handle())
    assert size == 0
    resource.free()
