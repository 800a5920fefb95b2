"""Tests of arrays as data: on the client, and on the workers of the shared cluster."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.data import Epochs, arrays, client
from tests.data.visits import EXACT, Visits, numbered
from tests.ps_strategy.every_worker import TIMEOUT


def ordered(epoch, start, count, number=0, seed=-1):
    return np.array([epoch, start, count, number, seed])


def test_rows_are_read_in_the_structure_that_was_given():
    x, y = np.arange(12.0).reshape(6, 2), np.array(list("abcdef"))
    found = arrays(x, y).read(ordered(0, 2, 3))
    np.testing.assert_array_equal(found[0], x[2:5])
    assert found[1].numpy().tolist() == [b"c", b"d", b"e"]
    np.testing.assert_array_equal(arrays({"x": x, "z": [y, y]}).read(ordered(0, 5, 1))["x"], x[5:])
    np.testing.assert_array_equal(arrays(x).read(ordered(0, 0, 6)), x)


def test_shuffled_epochs_are_permutations_that_differ():
    source = arrays(np.arange(1000))
    epochs = [
        np.concatenate([source.read(ordered(epoch, start, 100, seed=17)) for start in range(0, 1000, 100)])
        for epoch in (0, 1)
    ]
    for each in epochs:
        assert sorted(each) == list(range(1000))
        assert np.abs(np.diff(each)).mean() > 100
    assert (epochs[0] != epochs[1]).mean() > 0.9


def test_what_cannot_be_rows_is_refused():
    for structure, words in (
        ((), "at least one array"),
        ((np.arange(3), np.arange(4)), "the same number of rows, got 3, 4"),
        ((np.float32(3),), "without rows"),
        ((np.zeros([0, 3]),), "without rows"),
        ((np.broadcast_to(np.float32(0), [2**20, 300]),), r"1\.2 GiB.*coordinator\.data\.rows"),
    ):
        with pytest.raises(ValueError, match=words):
            arrays(*structure)


def test_the_digest_is_that_of_the_data():
    x = np.arange(10_000)
    assert arrays(x).digest == arrays(x.copy()).digest
    assert len({each.digest for each in (arrays(x), arrays(x[1:]), arrays(x + 1), arrays(x.astype(np.int32)))}) == 4


def test_workers_train_each_example_once_in_fused_calls_read_ahead_or_not(strategy):
    of_the_client = client([(np.int64(each), np.float32(each) ** 2) for each in range(201)])
    for source, settings in ((numbered(603), {}), (numbered(603), {"prefetch": 2}), (of_the_client, {})):
        visits, epochs = Visits(strategy, source, 2), Epochs(source, batch_size=10, epochs=2, shuffle=3, **settings)
        for positions in epochs.on(strategy):
            strategy.schedule(visits.step, args=(positions,))
        assert epochs.done
        assert visits.summary() == EXACT, settings
        strategy.join(TIMEOUT)
        with pytest.raises(StopIteration):
            next(epochs.on(strategy))


def test_a_range_may_be_anywhere_among_the_arguments(strategy):
    source = numbered(30)

    @tf.function
    def step(scale, data):
        return scale * tf.cast(tf.reduce_sum(source.read(data["positions"][0])[0]), tf.float32)

    total = 0.0
    for number, positions in enumerate(Epochs(source, batch_size=10).on(strategy)):
        data = {"positions": [positions]}
        args, kwargs = ((0.5, data), None) if number else ((), {"scale": 0.5, "data": data})
        total += strategy.schedule(step, args=args, kwargs=kwargs).result(TIMEOUT)
    assert total == sum(range(30)) / 2
