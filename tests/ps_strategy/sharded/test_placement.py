"""Tests of the servers that parts and variables of different sizes are placed on."""

import types

import pytest
import tensorflow as tf

from coordinator.ps_strategy.sharded.creation import Placement

MB = 2**20


@pytest.fixture
def placed():
    """Returns a function that places variables of these sizes in MB, one after the other or as parts of one."""
    variables: list = []
    placement = Placement(("a", "b", "c"), lambda: variables)

    def place(sizes, at_once=False):
        devices = []
        for group in [sizes] if at_once else [[size] for size in sizes]:
            found = placement.next_devices([int(size * MB) for size in group])
            variables.extend(
                types.SimpleNamespace(device=device, shape=tf.TensorShape([int(size * MB / 4)]), dtype=tf.float32)
                for device, size in zip(found, group, strict=True)
            )
            devices += found
        return "".join(devices)

    return place


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("sizes", [[0.01, 0.5, 0, 0.9] * 2, [4, 3.9, 3.9, 3.9, 3.8], [64, 63, 63, 64]])
def test_equal_and_small_variables_are_placed_in_turn(placed, sizes, at_once):
    assert placed(sizes, at_once) == ("abc" * 3)[: len(sizes)]


def test_large_variables_go_where_the_fewest_bytes_are(placed):
    # In turn, one server would have all of the large ones.
    sizes = [100, 2, 2, 100, 2, 2, 100, 2, 2]
    held = dict.fromkeys("abc", 0)
    for device, size in zip(placed(sizes), sizes, strict=True):
        held[device] += size
    assert max(held.values()) <= 110


def test_the_parts_of_one_variable_count_for_each_other(placed):
    assert placed([200]) == "a"
    assert placed([50, 50, 50, 50], at_once=True) == "bcbc"
