"""Tests of ranges that are chosen when a worker takes their function, in memory and on the shared cluster."""

import contextlib
import dataclasses
import itertools
import threading
import types
from collections import Counter, defaultdict

import numpy as np
import pytest
import tensorflow as tf

from coordinator.data import Epochs, arrays, client, records
from coordinator.data.ranges import LateRange, LateRanges
from tests.data.fake_strategy import FakeStrategy
from tests.data.test_files import FEATURES, write_records
from tests.data.visits import EXACT, Visits, numbered
from tests.fake_cluster import OPTIONS
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


def test_a_worker_takes_what_it_has_read_ahead_in_order():
    reader, late = ranges_of(6)
    assert [each.value_on(on(0)) for each in late] == list(range(6))
    assert (reader.read, reader.taken) == ([0], [1, 2, 3, 4, 5])


def test_functions_exchange_ranges_so_that_each_has_one():
    reader, late = ranges_of(9)
    found = [late[place].value_on(on(worker)) for place, worker in ((0, 0), (1, 1), (4, 1), (2, 0), (3, 1), (8, 0))]
    assert found == [0, 3, 4, 1, 5, 2]
    assert sorted(each.number for each in late) == list(range(9))
    assert reader.read == [0, 3]
    assert [each.value_on(on(0)) for each in late[5:8]] == [7, 6, 8]


def test_what_a_worker_that_died_has_read_ahead_is_read_by_others():
    reader, late = ranges_of(8)
    late[0].value_on(on(0))
    late[1].value_on(on(1))
    assert late[2].value_on(on(0, connection=1)) == 1, "read ahead on the connection of before"
    assert [each.value_on(on(1)) for each in late[3:5]] == [4, 5]
    assert sorted(each.value_on(on(0, connection=1)) for each in late[5:]) == [2, 6, 7]
    assert reader.read[:3] == [0, 3, 1]
    reader, late = ranges_of(5)
    late[0].value_on(on(0))
    assert sorted(each.value_on(on(1)) for each in late[1:]) == [1, 2, 3, 4], "although worker 0 does not return"


def test_a_function_that_is_run_again_keeps_its_range():
    _, late = ranges_of(5)
    assert [late[0].value_on(on(0)), late[1].value_on(on(0)), late[0].value_on(on(1))] == [0, 1, 0]
    assert late[1].value_on(on(0)) == 1


def test_after_a_failure_nothing_is_expected_to_be_read():
    reader, late = ranges_of(6)
    late[0].value_on(on(0))
    reader.fails = 1
    assert late[1].value_on(on(0)) == 1
    assert [each.value_on(on(0)) for each in late[2:]] == [2, 3, 4, 5]
    assert (reader.read, reader.taken) == ([0, 1, 2], [3, 4, 5])


def test_ranges_of_cancelled_functions_are_dropped():
    _, late = ranges_of(6)
    late[0].value_on(on(0))
    for each in late[1:3]:
        each.ranges.remove(each)
    assert [each.value_on(on(0)) for each in late[3:]] == [3, 4, 5]
    with pytest.raises(ValueError, match="Two functions were scheduled with one range"):
        late[3].follow(None)


@pytest.mark.parametrize("seed", range(5))
def test_each_range_has_one_function_whatever_happens(seed):
    random = np.random.default_rng(seed)
    reader, late = ranges_of(200, slots=3)
    waiting, ended, connections = list(late), Counter(), [0, 0, 0]
    while waiting:
        each, worker = waiting.pop(random.integers(min(len(waiting), 5))), random.integers(3)
        event = random.integers(12)
        reader.fails = event == 0
        connections[worker] += event == 1
        if event == 2:
            each.ranges.remove(each)
        else:
            assert each.value_on(on(worker, connections[worker])) == each.number
        ended[each.number] += 1
    assert ended == Counter(range(200))


class FakeAhead(FakeStrategy):
    """Workers in memory that read ahead."""

    def __init__(self, options=OPTIONS):
        super().__init__(options)
        self.reader = Slots()
        self.reader.spec = None
        self.extended.read_ahead = lambda read, slots: self.reader


def test_every_range_is_trained_once_although_functions_fail():
    epochs, visits, lock = Epochs(arrays(np.arange(97)), 10, 3, shuffle=1, prefetch=2), Counter(), threading.Lock()
    failures = itertools.chain([True, False, True], itertools.repeat(False))

    def step(worker, late):
        if next(failures):
            raise RuntimeError
        found = late.value_on(on(worker))
        with lock:
            visits[tuple(found[:2])] += 1

    with contextlib.closing(FakeAhead(dataclasses.replace(OPTIONS, stop_on_error=False))) as strategy:
        while not epochs.done:
            with contextlib.suppress(RuntimeError):
                for late in epochs.on(strategy):
                    strategy.schedule(step, (late,))
    assert len(visits) == 30
    assert set(visits.values()) == {1}


def test_data_of_the_client_is_not_read_ahead():
    with pytest.raises(ValueError, match="leave prefetch out"):
        Epochs(client([1, 2, 3]), 1, prefetch=1)
    with pytest.raises(ValueError, match="prefetch"):
        Epochs(arrays(np.arange(3)), 1, prefetch=-1)


def test_workers_train_each_example_once_from_what_they_have_read_ahead(strategy):
    source = numbered(203)
    visits = Visits(strategy, source, 2)
    for positions in Epochs(source, 10, 2, shuffle=3, prefetch=2).on(strategy):
        strategy.schedule(visits.step, args=(positions,))
    assert visits.summary() == EXACT


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
