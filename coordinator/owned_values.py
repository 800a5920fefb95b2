"""A map whose values live as long as their keys, and do not keep the keys alive.

A `weakref.WeakKeyDictionary` holds its values, so a value that refers to its key, even indirectly, is never freed. For
example, a traced function refers to captured variables, and a variable refers to the function that creates its initial
value. Here each key holds its value as an attribute, so the garbage collector finds such reference cycles.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any, Generic, TypeVar

_Value = TypeVar("_Value")


class _Owned:
    """The attribute of a key that holds the key's value. Deep copies and pickles of the key have an empty `_Owned`."""

    __slots__ = ("owner", "value")

    def __init__(self, owner: int | None = None, value: Any = None) -> None:
        self.owner = owner
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return _Owned, ()


class OwnedValues(MutableMapping[Any, _Value], Generic[_Value]):
    """Maps objects, by their identity, to values that are attributes of the objects.

    A value is freed with its key, or with the map. Every method may be called from any thread. Keys that cannot have
    attributes, such as numbers and bound methods, are never found, and cannot be added.
    """

    def __init__(self) -> None:
        self._name = f"_coordinator_value_{id(self)}"
        # Reentrant: the garbage collector may run any code while the lock is held.
        self._lock = threading.RLock()
        # Keys are found by `id(key)`, because keys may compare by value or be unhashable.
        self._keys: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        weakref.finalize(self, _drop_all, self._keys, self._name).atexit = False

    # The map uses `object.__getattribute__` and `object.__setattr__`, because `getattr` of a bound method would return
    # the attribute of its function, and because Keras and TensorFlow track assignments.

    def __getitem__(self, key: Any) -> _Value:
        try:
            owned = object.__getattribute__(key, self._name)
        except AttributeError:
            raise KeyError(key) from None
        # `copy.copy` of a key copies the attribute too.
        if owned.owner != id(key):
            raise KeyError(key)
        value: _Value = owned.value
        return value

    def __setitem__(self, key: Any, value: _Value) -> None:
        try:
            object.__setattr__(key, self._name, _Owned(id(key), value))
        except AttributeError:
            raise TypeError(f"{key!r} cannot have a value: it has no attributes.") from None
        self._keys[id(key)] = key

    def __delitem__(self, key: Any) -> None:
        try:
            object.__delattr__(key, self._name)
        except AttributeError:
            raise KeyError(key) from None
        self._keys.pop(id(key), None)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        with self._lock:
            return super().setdefault(key, default)

    def __iter__(self) -> Iterator[Any]:
        return (key for reference in self._keys.valuerefs() if (key := reference()) is not None)

    def __len__(self) -> int:
        return len(self._keys)

    def clear(self) -> None:
        _drop_all(self._keys, self._name)


def _drop_all(keys: weakref.WeakValueDictionary[int, Any], name: str) -> None:
    for reference in keys.valuerefs():
        if (key := reference()) is not None:
            with contextlib.suppress(AttributeError):
                object.__delattr__(key, name)
    keys.clear()
