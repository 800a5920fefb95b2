"""Tests of data that the client reads, on workers in memory, and in fused calls of the shared cluster."""

import contextlib
import itertools

import numpy as np
import pytest
import tensorflow as tf

from coordinator.data import Epochs, client
from tests.data.fake_strategy import FakeStrategy
from tests.fake_cluster import OPTIONS
from tests.ps_strategy.every_worker import TIMEOUT

SIZE = 53


def generated(begun=None):
    if begun is not None:
        begun.append(1)
    for number in range(SIZE):
        yield number, {"text": "x" * number, "half": number / 2}


class Numbers:
    """A sequence that cannot be iterated."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return np.int64(index), np.full(2, index, np.float32)


class Together(Numbers):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def train(epochs, stop=None, **settings):
    """Runs the loop to its end, or to a range; returns the ids of each range that was handed out."""
    found = []
    with contextlib.closing(FakeStrategy(OPTIONS)) as strategy:
        for given in epochs.on(strategy, **settings):
            found.append(epochs.source.read(given)[0].tolist())
            strategy.schedule(lambda worker, _: None, (given,))
            if len(found) == stop:
                break
        strategy.scheduler.join(TIMEOUT)
    return found


def test_a_sequence_is_shuffled_anew_in_each_epoch():
    for data in (Numbers(), Together(), [(each, each) for each in range(SIZE)]):
        ranges = train(Epochs(client(data), batch_size=10, epochs=2, shuffle=3))
        first, second = (list(itertools.chain(*each)) for each in (ranges[:6], ranges[6:]))
        assert sorted(first) == sorted(second) == list(range(SIZE))
        assert first != second
        assert np.abs(np.diff(first)).mean() > 5
        assert list(itertools.chain(*train(Epochs(client(data), batch_size=10)))) == list(range(SIZE))


def test_what_is_iterated_is_read_in_order_once_in_each_epoch():
    begun = []
    source = client(lambda: generated(begun), SIZE)
    ranges = train(Epochs(source, batch_size=10, epochs=2))
    assert list(itertools.chain(*ranges)) == [*range(SIZE), *range(SIZE)]
    assert len(begun) == 3, "once for its digest"
    assert client(generated).size == SIZE
    assert client(tf.data.Dataset.range(SIZE)).size == SIZE


def test_examples_are_stacked_in_their_structure_and_strings_keep_nul_bytes():
    source = client(generated)
    read = source.read(source.reader()((0, 1, 3, 0, -1)))
    np.testing.assert_array_equal(read[0], [1, 2, 3])
    assert read[1]["text"].numpy().tolist() == [b"x", b"xx", b"xxx"]
    assert (read[1]["half"].dtype, read[1]["half"].tolist()) == (np.float32, [0.5, 1, 1.5])
    source = client([(b"a\0", "b\0"), (b"\0\0", ""), (b"c", "d")])
    found = [part.numpy().tolist() for part in source.read(source.reader()((0, 0, 3, 0, -1)))]
    assert found == [[b"a\0", b"\0\0", b"c"], [b"b\0", b"", b"d"]]


def test_a_restored_checkpoint_goes_on_with_the_examples_that_are_left():
    for data, shuffle in ((Numbers(), 5), (generated, None)):
        epochs = Epochs(client(data), batch_size=10, epochs=2, shuffle=shuffle)
        first = train(epochs, stop=8)
        resumed = Epochs(client(data), batch_size=10, epochs=2, shuffle=shuffle)
        resumed.deserialize(epochs.serialize())
        seen = sorted(itertools.chain(*first, *train(resumed)))
        assert seen == sorted([*range(SIZE), *range(SIZE)])
        back = Epochs(client(data), batch_size=10, epochs=2, shuffle=shuffle)
        train(back, stop=3)
        back.reset()
        assert train(back, stop=2) == first[:2]


def test_data_that_cannot_be_read_again_is_refused_in_words():
    passes = iter([range(20), range(1, 20)])
    changing, short = client(lambda: next(passes), 20), client(lambda: range(20), 25)
    for error, words, refused in (
        (TypeError, r"iterated once.*client\(lambda: read\(path\)\)", lambda: client(generated())),
        (TypeError, "a sequence, or what can be iterated, got 3", lambda: client(3)),
        (ValueError, "a sequence has its own", lambda: client([1], 1)),
        (ValueError, r"dataset without an end.*repeat\(\).*size=", lambda: client(tf.data.Dataset.range(5).repeat())),
        (ValueError, "without examples", lambda: client([])),
        (ValueError, "without examples", lambda: client(lambda: ())),
        (ValueError, "cannot be shuffled", lambda: Epochs(client(generated), batch_size=5, shuffle=1)),
        (ValueError, "gave other examples when it was iterated again", lambda: train(Epochs(changing, batch_size=5))),
        (ValueError, "ended after 20 examples in epoch 0; it had 25", lambda: train(Epochs(short, batch_size=5))),
        (TypeError, "comes with the ranges", lambda: short.read(np.zeros(5))),
    ):
        with pytest.raises(error, match=words):
            refused()


def test_large_examples_keep_few_ranges_under_way_and_one_without_a_worker():
    large = client([np.zeros(2**24, np.uint8)] * 20)
    with contextlib.closing(FakeStrategy(OPTIONS)) as strategy:
        epochs = Epochs(large, batch_size=1)
        for given in epochs.on(strategy):
            assert epochs.statistics().out <= 16
            strategy.schedule(lambda worker, _: None, (given,))
    # A range has more bytes than all that are to be under way.
    with contextlib.closing(FakeStrategy(OPTIONS, workers=1)) as strategy:
        strategy.cluster.remove_worker(0)
        ranges = Epochs(large, batch_size=20).on(strategy)
        strategy.schedule(lambda worker, _: None, (next(ranges),))
        ranges.close()
