"""Tests of what limits a table: admission, eviction, and what happens when it is full."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.embeddings import MinCount, OlderThan, Probability, SmallerThan, Uniform
from tests.embeddings.tables import DIM, Trainer, make_table

# Each server limits its own part of a table as one process does; a table on two is in `test_table.py`.
pytestmark = pytest.mark.unconnected

DEFAULT = 9.0


def has_row(table, keys):
    """Returns which keys have a row, as a list."""
    return (table.lookup(keys).numpy()[:, 0] != DEFAULT).tolist()


def counts_of(table):
    """Returns the statistics, which add up and agree with the keys of the rows and with the index."""
    statistics, [shard] = table.statistics(), table.shards
    keys = shard.read_rows(0, shard.capacity)[0]
    np.testing.assert_array_equal(shard.key_of.sparse_read(shard.find(keys)), keys)
    assert statistics.admitted - statistics.evicted == statistics.size == len(keys)
    return statistics


@pytest.mark.long
def test_a_key_gets_a_row_when_it_is_seen_often_enough():
    table = make_table(None, 20, admission=MinCount(3), default=DEFAULT)
    trainer = Trainer(None, table)
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
    keys, times = table.shards[0].read_waiting(0, 100)
    assert dict(zip(keys.numpy(), times.numpy(), strict=True)) == {2: 2, 3: 1, 4: 2}
    # Counts are kept of as many keys as there may be rows; those before are forgotten, and begin again.
    for first in range(100, 300, 3):
        trainer.train(np.arange(first, first + 3))
    assert counts_of(table).waiting == 20
    trainer.train([2, 2, 299])
    trainer.train([299, 299, 299])
    assert has_row(table, [2, 299]) == [False, True]


def test_rows_without_gradients_and_small_ones_are_evicted_and_used_again():
    table = make_table(None, 28, eviction=[SmallerThan(0.1), OlderThan(2)], default=DEFAULT, when_full="default_row")
    trainer = Trainer(None, table)
    old, young = np.arange(20), np.arange(100, 108)
    trainer.train(old)
    for _ in range(3):
        trainer.train(young)
    assert table.evict() == counts_of(table).evicted == len(old)
    assert not any(has_row(table, old))
    assert table.evict() == 0
    back = trainer.train(old)
    initial = Uniform()(tf.constant(old, tf.int64), DIM)
    np.testing.assert_allclose(back, initial, rtol=1e-6)
    assert counts_of(table).refused == 0
    # A gradient that leaves zeros of two rows, with steps of 0.5.
    trainer.train(old[:3], 2 * (initial[:3] - 0.5 - [[0.0], [0.0], [1.0]]))
    assert table.evict() == 2
    assert has_row(table, old[:3]) == [False, False, True]


def test_some_keys_are_admitted_by_chance():
    table = make_table(None, admission=Probability(0.5))
    Trainer(None, table).train(np.arange(400))
    assert 120 < counts_of(table).size < 280


def test_a_full_table_raises():
    table = make_table(None, 8, default=DEFAULT)
    trainer = Trainer(None, table)
    trainer.train([1, 2])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"The table words is full: .* has room for 8 of its 8"):
        trainer.train(np.arange(100))
    # It is usable afterwards.
    trainer.train([1, 2])
    assert has_row(table, [1, 2]) == [True, True]
    assert counts_of(table).size <= 8


def test_a_full_table_evicts_what_was_not_trained_for_longest():
    table = make_table(None, 64, default=DEFAULT, when_full="evict_oldest")
    trainer = Trainer(None, table)
    first, second = np.arange(30), np.arange(100, 130)
    for keys in (first, second, first[:15]):
        trainer.train(keys)
    trainer.train(np.arange(200, 216))
    assert all(has_row(table, [*first[:15], *range(200, 216)]))
    assert counts_of(table).size <= 64
    # More than fit: those that are looked up are not evicted for each other.
    trainer.train(np.arange(300, 500))
    assert not any(has_row(table, first))
    assert (counts_of(table).size, counts_of(table).refused) == (64, 200 - 64)


def test_a_delta_that_does_not_fit_replaces_what_was_not_trained_for_longest(tmp_path):
    large, small = make_table(None, 200), make_table(None, 64, default=DEFAULT, when_full="evict_oldest")
    trainer = Trainer(None, large)
    trainer.train(np.arange(40))
    full = tf.train.Checkpoint(table=large).write(str(tmp_path / "full"))
    trainer.train(np.arange(100, 164))
    large.save_delta(str(tmp_path / "delta"))
    tf.train.Checkpoint(table=small).read(full).assert_consumed()
    small.restore_delta(str(tmp_path / "delta"))
    assert all(has_row(small, np.arange(100, 164)))
    assert not any(has_row(small, np.arange(40)))
