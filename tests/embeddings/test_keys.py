"""Tests of keys, of the buckets that they belong to, and of initial rows, which are functions of keys."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.embeddings import Constant, MinCount, Normal, OlderThan, Probability, SmallerThan, Uniform
from coordinator.embeddings.table_settings import BUCKETS, as_integers, bucket_of, capacities, server_of
from coordinator.errors import SettingError

KEYS = tf.constant([*range(1000), *range(0, 1000 * 2**20, 2**20), -1, 2**62], tf.int64)


def test_buckets_and_servers_have_about_equally_many_keys():
    buckets = bucket_of(tf.range(100_000, dtype=tf.int64)).numpy()
    counts = np.bincount(buckets, minlength=BUCKETS)
    assert len(counts) == BUCKETS
    assert 50 < counts.min() < counts.max() < 160
    for servers in (1, 2, 3, 7):
        owned = np.bincount(server_of(buckets, servers), minlength=servers)
        assert owned.min() > 0.9 * 100_000 / servers


def test_a_capacity_is_divided_as_the_buckets_are():
    assert capacities(1000, 1) == [1000]
    assert capacities(1000, 2) == [500, 500]
    assert sum(capacities(10**9, 3)) - 10**9 <= 3
    assert capacities(1, 4) == [1] * 4


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


def test_numbers_of_uniform_rows_are_within_the_scale():
    rows = Uniform(0.25)(tf.range(10_000, dtype=tf.int64), 16).numpy()
    assert -0.25 < rows.min() < -0.2499
    assert 0.2499 < rows.max() < 0.25
    np.testing.assert_array_equal(Constant(2.0)(KEYS, 3), np.full([len(KEYS), 3], 2.0))


def test_wrong_settings_are_refused():
    for kind, wrong in (
        (MinCount, 0),
        (Probability, 1.5),
        (OlderThan, 0),
        (SmallerThan, 0.0),
        (Uniform, -1.0),
        (Normal, 0),
    ):
        with pytest.raises(ValueError, match="must be"):
            kind(wrong)
    for seed in (-(2**63) - 1, 2**63, 0.5):
        with pytest.raises(SettingError, match="seed must be an integer from -9223372036854775808 to 922337203685477"):
            Uniform(0.5, seed=seed)
