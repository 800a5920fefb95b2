"""Tests of what counts in the mean of models: which changes, and how many workers there are."""

import numpy as np
import pytest

from coordinator.updates.rules.model_average import PATIENCE
from tests.updates.state.averaging_parts import GENERATION, Control, ids_of


@pytest.fixture
def control(request):
    return Control(request.node.name)


@pytest.fixture
def divisor(control):
    """`divisor(worker, number, connection=1)` counts a change, and returns what it is divided by."""

    def call(worker, number, connection=1):
        counted, is_new, _ = control.count(ids_of(worker, number, connection))
        assert is_new
        (_, *numbers), (_, *divisors) = counted.numpy().tolist()
        assert numbers[worker] == number
        return divisors[worker]

    return call


def test_a_change_is_counted_once_with_the_workers_at_that_time(control, divisor):
    assert divisor(3, 1) == 1
    assert divisor(0, 1) == 2
    counted, is_new, is_counted = control.count(ids_of(3, 1))
    assert (is_new, is_counted) == (False, True)
    known = counted.numpy()
    assert known[0, 0] == GENERATION
    assert known[:, 1:][:, [0, 3]].tolist() == [[1, 1], [2, 1]]
    assert np.count_nonzero(known[0, 1:]) == 2


def test_what_comes_late_from_a_lost_worker_or_generation_does_not_count(control, divisor):
    divisor(0, 1, connection=3)
    divisor(1, 1)
    control.remove(0, True)
    assert control.count(ids_of(0, 2, connection=3))[1:] == (False, False)
    assert divisor(1, 2) == 1
    assert divisor(0, 2, connection=4) == 2
    assert control.count(ids_of(0, 3, connection=3))[1:] == (False, False)
    # Of an older generation.
    assert control.count(ids_of(0, 3, connection=4, generation=GENERATION + 1))[1:] == (False, False)


def test_an_idle_worker_counts_until_the_others_have_averaged_often_without_it(control, divisor):
    divisor(0, 1)
    divisor(1, 1)
    control.remove(0, False)
    divisors = [divisor(1, 2 + number) for number in range(2 * PATIENCE + 2)]
    assert divisors == [2] * (2 * PATIENCE + 1) + [1]
    # It trains again.
    assert divisor(0, 2) == 2
    # For a moment.
    for number in range(3 * PATIENCE):
        control.remove(0, False)
        assert divisor(0, 3 + number) == 2
        assert divisor(1, 100 + number) == 2
