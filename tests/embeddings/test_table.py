"""Tests of tables: keys and their initial rows, gradients, and both at the same time as evictions."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.embeddings import Constant, MinCount, Normal, OlderThan, Probability, SmallerThan, Table, Uniform
from coordinator.embeddings.table_settings import BUCKETS, as_integers, bucket_of, capacities, server_of
from coordinator.errors import SettingError
from tests.embeddings.tables import DIM, TIMEOUT, Trainer, make_step, make_table, subtract
from tests.ps_strategy.fusing.fused_calls import COUNT, STEPS, FusedCalls

KEYS = tf.constant([*range(1000), *range(0, 1000 * 2**20, 2**20), -1, 2**62], tf.int64)


def test_servers_have_about_equally_many_keys_and_parts_of_the_capacity():
    buckets = bucket_of(tf.range(100_000, dtype=tf.int64)).numpy()
    counts = np.bincount(buckets, minlength=BUCKETS)
    assert len(counts) == BUCKETS
    assert 50 < counts.min() < counts.max() < 160
    for servers in (1, 2, 3, 7):
        owned = np.bincount(server_of(buckets, servers), minlength=servers)
        assert owned.min() > 0.9 * 100_000 / servers
    assert [capacities(1000, 1), capacities(1000, 2), capacities(1, 4)] == [[1000], [500, 500], [1] * 4]
    assert sum(capacities(10**9, 3)) - 10**9 <= 3


def test_strings_become_integers():
    keys = as_integers([["a", "b"], ["a", ""]]).numpy()
    assert keys.dtype == np.int64
    assert keys[0, 0] == keys[1, 0]
    assert len(np.unique(keys)) == 3
    assert keys.min() >= 0
    assert as_integers(np.uint8(5)).numpy() == 5


@pytest.mark.parametrize("initializer", [Uniform, Normal])
def test_initial_rows_depend_on_key_and_seed_alone(initializer):
    rows = initializer(0.5, seed=3)(KEYS, 8).numpy()
    reverse = initializer(0.5, seed=3)(KEYS[::-1], 8).numpy()
    np.testing.assert_array_equal(rows, reverse[::-1])
    assert not np.any(rows == initializer(0.5, seed=4)(KEYS, 8).numpy())
    assert len(np.unique(rows)) > 0.99 * rows.size
    assert abs(rows.mean()) < 0.02
    deviation = 0.5 if initializer is Normal else 0.5 / np.sqrt(3.0)
    assert abs(rows.std() - deviation) < 0.02
    # Neither neighbouring keys nor columns depend on each other.
    assert np.abs(np.corrcoef(rows[:1000].T) - np.eye(8)).max() < 0.15
    assert abs(np.corrcoef(rows[:999].ravel(), rows[1:1000].ravel())[0, 1]) < 0.05


def test_numbers_of_uniform_rows_are_within_the_scale_and_wrong_settings_refused():
    rows = Uniform(0.25)(tf.range(10_000, dtype=tf.int64), 16).numpy()
    assert -0.25 < rows.min() < -0.2499
    assert 0.2499 < rows.max() < 0.25
    for kind, wrong in (
        (MinCount, 0),
        (Probability, 1.5),
        (OlderThan, 0),
        (SmallerThan, 0.0),
        (Uniform, -1),
        (Normal, 0),
    ):
        with pytest.raises(ValueError, match="must be"):
            kind(wrong)
    for seed in (-(2**63) - 1, 2**63, 0.5):
        with pytest.raises(SettingError, match="seed must be an integer from -9223372036854775808 to 922337203685477"):
            Uniform(0.5, seed=seed)


def initial(*keys):
    return Uniform()(tf.constant(keys, tf.int64), DIM).numpy()


def test_keys_get_rows_in_training_alone(strategy):
    table = make_table(strategy, default=0.25)
    keys = tf.constant([3, 10**15, -7], tf.int64)
    np.testing.assert_array_equal(table.lookup(keys), np.full([3, DIM], 0.25))
    assert table.size() == 0

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.int64), tf.TensorSpec([None], tf.int64)])
    def step(keys, others):
        with tf.GradientTape() as tape:
            rows = table.lookup(keys, training=True)
            loss = tf.reduce_sum(rows) + tf.reduce_sum(table.lookup(others, training=True))
        gradient = tape.gradient(loss, table.variable)
        table.apply_gradients(gradient)
        return rows, gradient.dense_shape

    def train(*given):
        return strategy.schedule(step, [np.array(each, np.int64) for each in given], worker=0).result(TIMEOUT)

    rows, shape = train([[3, 10**15], [-7, 3]], [])
    assert np.array(shape).tolist() == [1000, DIM]
    np.testing.assert_allclose(rows, initial(3, 10**15, -7, 3).reshape(2, 2, DIM))
    assert table.size() == 3
    # The gradient of key 3 is the sum of its two places.
    changes = table.lookup(keys) - initial(3, 10**15, -7)
    np.testing.assert_allclose(changes, [[-1.0] * DIM, [-0.5] * DIM, [-0.5] * DIM], atol=1e-6)
    np.testing.assert_array_equal(table.lookup([[4]]), np.full([1, 1, DIM], 0.25))
    statistics = table.statistics()
    assert (statistics.size, statistics.admitted, statistics.steps, statistics.dropped) == (3, 3, 1, 0)
    # A row, its key, stamp, and place on the list of free ones.
    assert statistics.bytes == 3 * (DIM * 4 + 8 + 8 + 8)
    # Gradients of several look-ups add up.
    train([[1, 2]], [2])
    np.testing.assert_allclose(table.lookup([1, 2]) - initial(1, 2), [[-0.5] * DIM, [-1.0] * DIM], atol=1e-6)


@pytest.mark.long
def test_racing_workers_lose_no_addition_and_make_one_row_for_a_key(strategy, monkeypatch):
    table = make_table(strategy, 4000)
    fused = FusedCalls(strategy, monkeypatch)
    random = np.random.default_rng(0)
    batches = [random.integers(0, 500, 40) for _ in range(2 * COUNT)]
    fused.run(make_step(table), [(batch, np.ones([40, DIM], np.float32)) for batch in batches])
    assert STEPS in fused.sizes
    keys, counts = np.unique(np.concatenate(batches), return_counts=True)
    np.testing.assert_allclose(initial(*keys) - table.lookup(keys), 0.5 * np.outer(counts, np.ones(DIM)), atol=1e-4)
    contents = [shard.read_rows(0, 4000) for shard in table.shards]
    assert sorted(np.concatenate([content[0].numpy() for content in contents])) == keys.tolist()
    statistics = table.statistics()
    assert (statistics.size, statistics.steps) == (len(keys), len(batches))


def test_what_is_no_gradient_of_the_table_is_refused(strategy):
    table = make_table(strategy)
    for wrong in (None, tf.ones([2, DIM])):
        with pytest.raises(TypeError, match=r"gradient of the table 'words' must be the tf\.IndexedSlices"):
            table.apply_gradients(wrong)
    with pytest.raises(NotImplementedError, match="'words' cannot be read as a whole"):
        tf.convert_to_tensor(table.variable)
    with pytest.raises(RuntimeError, match=r"created inside strategy\.scope"):
        Table("words", DIM, 10, subtract)


def test_a_table_that_does_not_fit_the_machine_is_refused(strategy):
    with pytest.raises(ValueError, match=r"The table 'words' does not fit: when it is full, it takes \d+\.\d GB on"):
        make_table(strategy, 10**11)
    for wrong in ({"when_full": "wait"}, {"admission": 3}, {"eviction": [3]}, {"optimizer": "adam"}, {"capacity": 0}):
        with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
            make_table(strategy, **wrong)


@pytest.mark.long
def test_a_full_table_gives_the_default(strategy):
    table = make_table(strategy, 8, default=9.0, when_full="default_row")
    trainer = Trainer(strategy, table)
    for _ in range(2):
        trainer.train(np.arange(100))
    statistics = table.statistics()
    assert (statistics.size, statistics.refused, statistics.dropped) == (8, 184, 184)
    assert np.count_nonzero(table.lookup(np.arange(100))[:, 0] != 9.0) == 8


DEFAULT = -1.0
SEEN = 400


def key_in_each_column(keys, dim):
    return tf.repeat(tf.cast(keys, tf.float32)[:, tf.newaxis], dim, axis=1)


@pytest.mark.long
def test_no_look_up_sees_the_row_of_another_key_while_rows_are_evicted(strategy):
    table = make_table(
        strategy,
        SEEN // 4,
        lambda rows, gradient: rows.assign_sub(0.0 * gradient),
        initializer=key_in_each_column,
        eviction=OlderThan(1),
        when_full="evict_oldest",
        default=DEFAULT,
    )

    @tf.function
    def step():
        keys = tf.random.uniform([40], 0, SEEN, tf.int64)
        with tf.GradientTape() as tape:
            trained = table.lookup(keys[:20], training=True)
            rows = tf.concat([trained, table.lookup(keys[20:])], 0)
        table.apply_gradients(tape.gradient(trained, table.variable))
        is_own = rows == tf.cast(keys, tf.float32)[:, tf.newaxis]
        is_default = tf.reduce_all(rows == DEFAULT, axis=1, keepdims=True)
        return tf.math.count_nonzero(tf.logical_not(tf.logical_or(is_own, is_default)))

    futures = [strategy.schedule(step) for _ in range(100)]
    evicted = 0
    while not strategy.done():
        evicted += table.evict()
    assert [future.result() for future in futures] == [0] * len(futures)
    statistics = table.statistics()
    assert statistics.evicted >= evicted > 0
    assert statistics.admitted - statistics.evicted == statistics.size <= SEEN // 4
    rows = [shard.read_rows(0, SEEN) for shard in table.shards]
    keys = np.concatenate([keys for keys, *_ in rows])
    assert len(np.unique(keys)) == len(keys) == statistics.size
    np.testing.assert_array_equal(np.concatenate([part[1] for part in rows])[:, 0], keys)


@pytest.mark.long
def test_no_look_up_sees_a_part_of_an_update(strategy):
    width, size = 4096, 64
    with strategy.scope():
        table = Table(
            "wide", width, 2 * size, lambda rows, gradient: rows.assign_add(gradient), initializer=Constant(0.0)
        )

    @tf.function
    def step():
        keys = tf.range(size, dtype=tf.int64)
        table.lookup(keys, training=True)
        table.apply_gradients(tf.IndexedSlices(tf.ones([size, width]), keys))
        found = [table.lookup(keys) for _ in range(4)]
        return tf.math.count_nonzero([rows != rows[:, :1] for rows in found])

    futures = [strategy.schedule(step) for _ in range(100)]
    assert [future.result() for future in futures] == [0] * len(futures)
    np.testing.assert_array_equal(table.lookup(np.arange(size)), np.full([size, width], len(futures)))
