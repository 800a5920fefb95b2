"""Tests that values go with their keys, also where they refer to them."""

import gc
import weakref

import pytest

from coordinator.owned_values import OwnedValues


class Key:
    def __init__(self) -> None:
        self.value: object = None

    def method(self) -> None: ...


class Value:
    def __init__(self, key: object = None) -> None:
        self.key = key


def test_a_value_goes_with_its_key_although_it_refers_to_the_key() -> None:
    values: OwnedValues[Value] = OwnedValues()
    key = Key()
    values[key] = Value(key)
    value = weakref.ref(values[key])
    assert list(values) == [key]
    del key
    gc.collect()
    assert value() is None
    assert len(values) == 0


def test_values_go_with_their_map_or_when_they_are_dropped() -> None:
    values: OwnedValues[Value] = OwnedValues()
    other: OwnedValues[str] = OwnedValues()
    key, cleared = Key(), Key()
    other[key] = "of another map"
    for each in (key, cleared):
        values[each] = Value()
    of_cleared, of_map = weakref.ref(values[cleared]), weakref.ref(values[key])
    del values[cleared]
    assert of_cleared() is None
    assert cleared not in values
    values.clear()
    assert of_map() is None
    values[key] = Value()
    of_map = weakref.ref(values[key])
    del values
    assert of_map() is None
    assert other[key] == "of another map"


@pytest.mark.parametrize("key", [3, "text", Key().method, print], ids=lambda key: type(key).__name__)
def test_what_has_no_attributes_is_never_found_and_cannot_be_added(key: object) -> None:
    values: OwnedValues[int] = OwnedValues()
    values[Key.method] = 1
    assert values.get(key) is None
    with pytest.raises(TypeError, match="it has no attributes"):
        values[key] = 2
    with pytest.raises(KeyError):
        del values[key]
