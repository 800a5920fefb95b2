"""Tests of what limits a table: admission, eviction, and what happens when it is full."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.embeddings import Constant, MinCount, OlderThan, Probability, SmallerThan, Uniform
from tests.embeddings.tables import DIM, Trainer, make_table

DEFAULT = 9.0


def has_row(table, keys):
    """Returns which keys have a row, as a list."""
    return (table.lookup(keys).numpy()[:, 0] != DEFAULT).tolist()


def counts_of(table):
    """Returns the statistics, which add up, as a dict."""
    statistics = table.statistics()
    assert statistics.admitted - statistics.evicted == statistics.size == sum(len(keys) for keys in contents(table))
    return statistics


def contents(table):
    """Returns the keys that each server has rows for, checked against the index."""
    found = []
    for shard in table.shards:
        keys = shard.read_rows(0, shard.capacity)[0]
        numbers = shard.find(keys).numpy()
        np.testing.assert_array_equal(shard.key_of.sparse_read(numbers), keys)
        found.append(keys.numpy().tolist())
    return found


@pytest.mark.long
def test_a_key_gets_a_row_when_it_is_seen_often_enough(strategy):
    table = make_table(strategy, 20, admission=MinCount(3), default=DEFAULT)
    trainer = Trainer(strategy, table)
    seen = []
    for keys in ([1, 1, 2], [1, 3, 4], [1, 2, 4]):
        seen.append(trainer.train(keys)[0, 0])
        # Not counted.
        table.lookup([1, 2, 3])
    assert seen[:2] == [DEFAULT, DEFAULT]
    np.testing.assert_allclose(seen[2], Uniform()(tf.constant([1], tf.int64), DIM)[0, 0])
    assert has_row(table, [1, 2, 3]) == [True, False, False]
    statistics = counts_of(table)
    assert (statistics.size, statistics.waiting, statistics.dropped) == (1, 3, 7)
    waiting = [shard.read_waiting(0, 100) for shard in table.shards]
    counts = {key: times for keys, times in waiting for key, times in zip(keys.numpy(), times.numpy(), strict=True)}
    assert counts == {2: 2, 3: 1, 4: 2}
    # Counts are kept of as many keys as there may be rows; those before are forgotten, and begin again.
    for first in range(100, 300, 10):
        trainer.train(np.arange(first, first + 10))
    assert counts_of(table).waiting == 20
    trainer.train([2, 2, 299])
    trainer.train([299, 299, 299])
    assert has_row(table, [2, 299]) == [False, True]


@pytest.mark.long
def test_rows_without_gradients_are_evicted_and_used_again(strategy):
    table = make_table(strategy, 40, eviction=OlderThan(2), default=DEFAULT, when_full="default_row")
    trainer = Trainer(strategy, table)
    old, young = np.arange(20), np.arange(100, 108)
    trainer.train(old)
    for _ in range(3):
        trainer.train(young)
    assert table.evict() == counts_of(table).evicted > 0
    assert not any(has_row(table, old))
    assert table.evict() == 0
    back = trainer.train(old)
    np.testing.assert_allclose(back, Uniform()(tf.constant(old, tf.int64), DIM), rtol=1e-6)
    statistics = counts_of(table)
    assert statistics.size == len(old) + len(young)
    assert statistics.refused == 0


@pytest.mark.long
def test_small_rows_are_evicted_and_some_keys_admitted_by_chance(strategy):
    table = make_table(strategy, initializer=Constant(1.0), eviction=[SmallerThan(0.1), OlderThan(1000)])
    trainer = Trainer(strategy, table)
    # Steps of 0.5.
    trainer.train([1, 2], [[2.0] * DIM, [0.5] * DIM])
    assert table.evict() == 1
    np.testing.assert_allclose(table.lookup([1, 2]), [[0.0] * DIM, [0.75] * DIM])
    table = make_table(strategy, admission=Probability(0.5))
    Trainer(strategy, table).train(np.arange(400))
    assert 120 < counts_of(table).size < 280


@pytest.mark.long
def test_a_full_table_raises(strategy):
    table = make_table(strategy, 8, default=DEFAULT)
    trainer = Trainer(strategy, table)
    trainer.train([1, 2])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"The table words is full: .* has room for 4 of its 8"):
        trainer.train(np.arange(100))
    with pytest.raises(tf.errors.InvalidArgumentError):
        strategy.join()
    # It is usable afterwards.
    trainer.train([1, 2])
    assert has_row(table, [1, 2]) == [True, True]
    assert counts_of(table).size <= 6


def test_a_full_table_gives_the_default(strategy):
    table = make_table(strategy, 8, default=DEFAULT, when_full="default_row")
    trainer = Trainer(strategy, table)
    trainer.train(np.arange(100))
    trainer.train(np.arange(100))
    statistics = counts_of(table)
    assert (statistics.size, statistics.refused, statistics.dropped) == (8, 184, 184)
    assert sum(has_row(table, np.arange(100))) == 8


@pytest.mark.long
def test_a_full_table_evicts_what_was_not_trained_for_longest(strategy):
    table = make_table(strategy, 64, default=DEFAULT, when_full="evict_oldest")
    trainer = Trainer(strategy, table)
    first, second = np.arange(30), np.arange(100, 130)
    for keys in (first, second, first[:15]):
        trainer.train(keys)
    # Two servers, of which each may be full.
    trainer.train(np.arange(200, 216))
    assert all(has_row(table, [*first[:15], *range(200, 216)]))
    statistics = counts_of(table)
    assert statistics.evicted > 0
    assert statistics.size <= 64
    # More than fit: those that are looked up are not evicted for each other.
    trainer.train(np.arange(300, 500))
    statistics = counts_of(table)
    assert statistics.size == 64
    assert statistics.refused == 200 - 64
