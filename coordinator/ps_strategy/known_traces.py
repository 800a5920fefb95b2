"""What each function was traced into, so that the same call again is not looked up by TensorFlow, which takes long.

It is exact, or not used: only arguments of a few kinds are known here, by all that a trace may depend on. For any other
the answer is that nothing is known. A per-worker iterator or dataset is known by itself, and not kept alive; neither is
a function, nor what it was traced into.
"""

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.calls.traced_function import TracedFunction
from coordinator.ps_strategy.per_worker_dataset import PerWorkerDataset, PerWorkerIterator

# For one function; beyond it what is known of that function is forgotten. Each number that is given as a Python value
# is a trace of its own, and each iterator is known anew.
_MOST_TRACES = 64

_LITERALS = frozenset({int, float, bool, str, bytes, type(None)})


class KnownTraces:
    """Remembers, for each function and arguments, the trace and the values of arguments that were left out."""

    def __init__(self) -> None:
        self._of_function: weakref.WeakKeyDictionary[Any, dict[Hashable, _Entry]] = weakref.WeakKeyDictionary()

    def forget(self) -> None:
        """Nothing is known any more: functions are to be traced anew."""
        self._of_function = weakref.WeakKeyDictionary()

    def find(self, function: Any, args: Any) -> tuple[TracedFunction, Sequence[Any]] | None:
        """The trace for these positional arguments, and all arguments of the call; None if it is not known.

        Args:
          function: what a user scheduled, whatever it is.
          args: likewise, where a list or tuple is expected.
        """
        try:
            entries = self._of_function.get(function)
        except TypeError:
            return None
        if not entries or not isinstance(args, list | tuple) or not tf.executing_eagerly():
            return None
        resources: list[Any] = []
        key = _key(tuple(args), resources)
        entry = None if key is None else entries.get(key)
        return None if entry is None else entry.call(args, resources)

    def remember(self, function: Any, args: Sequence[Any], traced: TracedFunction, left_out: Sequence[Any]) -> None:
        """Notes a trace, if it can be told exactly when it is the right one.

        Args:
          function: a `tf.function`.
          args: the positional arguments that were given; there were no others.
          traced: what it was traced into.
          left_out: the values of the arguments that follow them and were not given.
        """
        resources: list[Any] = []
        key = _key(tuple(args), resources)
        if key is None or not tf.executing_eagerly():
            return
        entries = self._of_function.setdefault(function, {})
        if len(entries) >= _MOST_TRACES:
            entries.clear()
        entries[key] = _Entry(traced, resources, left_out)


class _Entry:
    """One trace.

    Args:
      traced: refers to no `tf.function`, so that none is kept alive.
      resources: the per-worker resources among the arguments.
      left_out: the values of the arguments that were not given.
    """

    def __init__(self, traced: TracedFunction, resources: Sequence[Any], left_out: Sequence[Any]) -> None:
        self._traced = traced
        self._resources = [weakref.ref(resource) for resource in resources]
        self._left_out = left_out

    def call(self, args: Sequence[Any], resources: Sequence[Any]) -> tuple[TracedFunction, Sequence[Any]] | None:
        # They are in the key by their identity, which another one may have by now.
        are_same = all(known() is given for known, given in zip(self._resources, resources, strict=True))
        return (self._traced, (*args, *self._left_out)) if are_same else None


def _key(value: Any, resources: list[Any]) -> tuple[Any, ...] | None:
    """All of an argument that a trace may depend on; None if that cannot be told. Adds the resources in it."""
    kind = type(value)
    if kind in _LITERALS:
        return kind, value
    if kind in (tuple, list, dict):
        parts = [_key(part, resources) for part in (value.values() if kind is dict else value)]
        return None if None in parts else (kind, tuple(value) if kind is dict else None, *parts)
    if kind in (PerWorkerIterator, PerWorkerDataset):
        resources.append(value)
        return kind, id(value)
    if kind is np.ndarray and not value.dtype.hasobject:
        return kind, value.dtype, value.shape
    if isinstance(value, tf.Tensor) and value.dtype not in (tf.resource, tf.variant):
        return tf.Tensor, value.dtype, tuple(value.shape)
    return None
