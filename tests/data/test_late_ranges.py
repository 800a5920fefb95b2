"""Tests of ranges that are chosen when a worker takes their function, in memory and on the shared cluster."""

import types
from collections import Counter, defaultdict

import numpy as np
import pytest
import tensorflow as tf

from coordinator.data import Epochs, arrays, client, records
from coordinator.data.ranges import LateRange, LateRanges
from tests.data.test_files import FEATURES, write_records
from tests.ps_strategy.every_worker import TIMEOUT


class Slots:
    """Reads ahead in memory as workers do: in slots, each of which has one range."""

    spec = None

    def __init__(self):
        self.slots = defaultdict(dict)
        self.taken, self.read, self.fails = [], [], 0

    def value_on(self, context, choice, on_failure):
        slots = self.slots[context.index, context.connection_number]
        if self.fails:
            self.fails -= 1
            slots.clear()
            on_failure()
            self.read.append(choice.positions)
        else:
            for slot, positions in choice.dropped:
                assert np.array_equal(slots.pop(slot), positions)
            if choice.slot is not None:
                assert np.array_equal(slots.pop(choice.slot), choice.positions)
                self.taken.append(choice.positions)
            for slot, positions in choice.begun:
                assert slot not in slots
                slots[slot] = positions
            if choice.slot is None:
                self.read.append(choice.positions)
        return choice.positions


def on(worker, connection=0):
    return types.SimpleNamespace(index=worker, connection_number=connection)


def ranges_of(count, slots=2):
    """Returns what reads, and `count` ranges whose functions wait."""
    reader = Slots()
    found = LateRanges(slots, lambda number: number, reader)
    late = [LateRange(number, found, lambda *_: None) for number in range(count)]
    for each in late:
        each.follow(None)
    return reader, late


def test_a_worker_takes_what_it_has_read_ahead_in_order_and_nothing_after_a_failure():
    reader, late = ranges_of(8)
    assert [each.value_on(on(0)) for each in late[:3]] == [0, 1, 2]
    assert (reader.read, reader.taken) == ([0], [1, 2])
    reader.fails = 1
    assert [each.value_on(on(0)) for each in late[3:]] == [3, 4, 5, 6, 7]
    assert (reader.read, reader.taken) == ([0, 3, 4], [1, 2, 5, 6, 7])


def test_two_functions_with_one_range_are_refused():
    _, late = ranges_of(1)
    with pytest.raises(ValueError, match="Two functions were scheduled with one range"):
        late[0].follow(None)


def test_each_range_has_one_function_whatever_happens():
    random, count = np.random.default_rng(0), 1000
    reader, late = ranges_of(count, slots=3)
    waiting, ended, connections, given = list(late), Counter(), [0, 0, 0], {}
    while waiting:
        each, worker = waiting.pop(random.integers(min(len(waiting), 5))), random.integers(3)
        event = random.integers(12)
        reader.fails = event == 0
        connections[worker] += event == 1
        if event == 2 and each not in given:
            # It was cancelled.
            each.ranges.remove(each)
        else:
            number = each.value_on(on(worker, connections[worker]))
            assert number == each.number == given.setdefault(each, number)
            if event == 3:
                # It is run again, later and perhaps by another worker.
                waiting.append(each)
                continue
        ended[each.number] += 1
    assert ended == Counter(range(count))
    assert len(reader.taken) > count / 4


def test_data_of_the_client_is_not_read_ahead():
    with pytest.raises(ValueError, match="leave prefetch out"):
        Epochs(client([1, 2, 3]), 1, prefetch=1)
    with pytest.raises(ValueError, match="prefetch"):
        Epochs(arrays(np.arange(3)), 1, prefetch=-1)


@pytest.mark.long
def test_structures_are_read_ahead_and_errors_are_those_of_the_function(strategy, tmp_path):
    source = records(write_records(tmp_path), FEATURES)

    @tf.function
    def step(positions, limit):
        example = source.read(positions)
        ids = example["id"]
        with tf.control_dependencies([tf.debugging.assert_less(ids, limit)]):
            return positions[0][3], ids, tf.strings.length(example["text"])

    def train(epochs, limit):
        return [strategy.schedule(step, args=(each, limit)) for each in epochs.on(strategy)]

    epochs = Epochs(source, 4, prefetch=3)
    with pytest.raises(tf.errors.InvalidArgumentError):
        train(epochs, np.int64(20))
    assert epochs.remaining >= 2
    found = [future.result(TIMEOUT) for future in train(epochs, np.int64(25))]
    assert epochs.done
    for number, ids, lengths in found:
        assert ids.tolist() == lengths.tolist() == list(range(4 * number, min(4 * number + 4, 25)))
