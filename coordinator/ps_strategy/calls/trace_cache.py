"""The traces of functions that were scheduled before, by the kind of their arguments.

TensorFlow's own lookup takes longer than all else that `schedule` does.
"""

import array
import functools
import operator
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from coordinator.data.late_ranges import LateRange
from coordinator.data.position_range import PositionRange, position_ranges
from coordinator.future import Future
from coordinator.owned_values import OwnedValues
from coordinator.ps_strategy.calls.traced_function import ScheduledCall, TracedFunction
from coordinator.ps_strategy.fusing.repeated_function import is_stackable
from coordinator.ps_strategy.per_worker.dataset import PerWorkerDataset, PerWorkerIterator
from coordinator.runtime import FusionKey

# For one function; when there are more, its entries are dropped. Each value of an argument that is a Python number is a
# separate trace, and each iterator an entry.
_MAX_TRACES = 64

# Returns the `FiniteInput` of a per-worker iterator.
input_of = operator.attrgetter("input")

# What a program may change after it was scheduled, of the kinds of arguments that are cached.
_MUTABLE = frozenset({np.ndarray, tuple, list, dict})
# To make a tensor of an array takes some microseconds more than to copy it, but saves a copy later. In bytes.
_LARGE = 2**18
_LITERALS = frozenset({int, float, bool, str, bytes, type(None)})


class _Trace(NamedTuple):
    """A cached trace: the function, weak references to the per-worker resources among its arguments, and the rest.

    Whether there are ranges of examples among its arguments is known, so that those of other calls are not searched.
    """

    function: TracedFunction
    resources: Sequence[weakref.ref[Any]]
    defaults: Sequence[Any]
    default_iterators: Sequence[PerWorkerIterator]
    fusion_key: FusionKey | None
    takes_ranges: bool


class TraceCache:
    """Remembers, for each function and kind of arguments, the trace and the default values of omitted arguments.

    It is exact or not used: only arguments of a few kinds are cached, by all that a trace may depend on. A per-worker
    iterator or dataset and a variable are identified by themselves. Neither functions, nor their traces, nor resources
    are kept alive.
    """

    def __init__(self) -> None:
        self._traces: OwnedValues[dict[Hashable, _Trace]] = OwnedValues()

    def clear(self) -> None:
        """Forgets everything."""
        self._traces.clear()

    def find(self, function: Any, args: Any, kwargs: Any = None) -> ScheduledCall | None:
        """Returns a call of a function with these arguments; None if such a call is not cached.

        Args:
          function: what a user scheduled, whatever it is.
          args: likewise, where a list or tuple is expected, or None for no arguments.
          kwargs: likewise, where a dict is expected, or None; calls with keyword arguments are not cached.
        """
        try:
            traces = self._traces.get(function)
        except TypeError:
            return None
        args = () if args is None else args
        if not traces or kwargs or not isinstance(args, list | tuple) or not tf.executing_eagerly():
            return None
        resources: list[Any] = []
        remote: list[int] = []
        trace = traces.get(_argument_key(tuple(args), resources, remote))
        if trace is None:
            return None
        for ref, given in zip(trace.resources, resources, strict=True):
            if ref() is not given:
                # Its identity, which is in the key, was another object's.
                return None
        key = trace.fusion_key
        if remote and key is not None:
            key = FusionKey(key.function, (key.arguments, *remote))
        iterators = (*iterators_among(resources), *trace.default_iterators) if resources else trace.default_iterators
        args = [own_copy(each) if type(each) in _MUTABLE else each for each in args]
        followers = followers_of(args, {}) if trace.takes_ranges else ()
        inputs = tuple(map(input_of, iterators))
        return ScheduledCall(trace.function, (*args, *trace.defaults), {}, iterators, inputs, key, followers=followers)

    def add(self, function: Any, args: Sequence[Any], traced: TracedFunction, defaults: Sequence[Any]) -> None:
        """Caches a trace, if it can be told exactly for which calls it is right.

        Args:
          function: a `tf.function`.
          args: the positional arguments that were given; there were no others.
          traced: what it was traced into.
          defaults: the values of the arguments that follow them and were omitted.
        """
        resources: list[Any] = []
        key = _argument_key(tuple(args), resources, [])
        if key is None or not tf.executing_eagerly():
            return
        traces = self._traces.setdefault(function, {})
        if len(traces) >= _MAX_TRACES:
            traces.clear()
        # Calls that find this entry agree in all that their trace depends on, so a new object is their key.
        fusion_key = FusionKey(traced.token, object()) if traced.may_be_fused and not are_late(args) else None
        iterators = iterators_among(tf.nest.flatten(list(defaults)))
        takes_ranges = bool(position_ranges(args, {}))
        references = [weakref.ref(each) for each in resources]
        traces[key] = _Trace(traced, references, defaults, iterators, fusion_key, takes_ranges)


def own_copy(value: Any) -> Any:
    """Returns a value that does not change if the program changes the one that it was given: arrays are copied.

    Args:
      value: an argument, or a nested structure.
    """
    kind = type(value)
    if kind in (tuple, list):
        return kind(map(own_copy, value))
    if kind is dict:
        return {key: own_copy(each) for key, each in value.items()}
    # Some sequences of numbers are arrays here, and structures to TensorFlow.
    if isinstance(value, bytearray | memoryview | array.array) or not tf.nest.is_nested(value):
        return _copied_leaf(value)
    return tf.nest.map_structure(_copied_leaf, value)


def _copied_leaf(value: Any) -> Any:
    if type(value) is np.ndarray:
        is_small = value.nbytes < _LARGE or value.dtype.kind not in "biufc"
        return value.copy() if is_small else _as_tensor(value)
    if isinstance(value, bytearray):
        return bytes(value)
    # A variable is passed as itself; a tensor, a number and a range of positions never change.
    is_constant = tf.is_tensor(value) or isinstance(value, tf.Variable | np.generic | PositionRange)
    is_array = isinstance(value, memoryview | array.array) or hasattr(value, "__array__")
    if is_constant or hasattr(value, "__tf_tensor__") or not is_array:
        return value
    # Arrays of other libraries, too.
    return np.array(np.asanyarray(value), subok=True)


def _as_tensor(value: Any) -> tf.Tensor:
    """Copies an array into the tensor that a call needs, on the client; the call need not copy it once more."""
    with tf.device(None), tf.device("/device:CPU:0"):
        return tf.constant(value)


def followers_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Callable[[Future], object]]:
    """Returns what is called with the future of a call: the ranges of examples among its arguments follow it."""
    return [each.follow for each in position_ranges(args, kwargs)]


def iterators_among(values: Sequence[Any]) -> list[PerWorkerIterator]:
    """Returns the per-worker iterators in a flat sequence."""
    return [value for value in values if isinstance(value, PerWorkerIterator)]


def _argument_key(value: Any, resources: list[Any], remote: list[int]) -> tuple[Any, ...] | None:
    """Returns all of an argument that a trace may depend on; None if that cannot be told.

    Args:
      value: the argument, or a part of it.
      resources: the per-worker resources in it are added.
      remote: the identities of tensors that are not on the client are added: calls are fused only if they share them.
    """
    kind = type(value)
    if kind in _LITERALS:
        return kind, value
    if kind in (tuple, list, dict):
        key_of = functools.partial(_argument_key, resources=resources, remote=remote)
        parts = [*map(key_of, value.values() if kind is dict else value)]
        return None if None in parts else (kind, tuple(value) if kind is dict else None, *parts)
    if kind in (PerWorkerIterator, PerWorkerDataset, LateRange) or isinstance(value, tf.Variable):
        resource = value.ranges if kind is LateRange else value
        resources.append(resource)
        return kind, id(resource)
    if kind in (np.ndarray, PositionRange) and not value.dtype.hasobject:
        return kind, value.dtype, value.shape
    if isinstance(value, tf.Tensor) and value.dtype not in (tf.resource, tf.variant):
        if not is_stackable(value):
            remote.append(id(value))
        return tf.Tensor, value.dtype, tuple(value.shape)
    return None


def are_late(args: Sequence[Any]) -> bool:
    """Returns whether examples are read ahead for a call, on the worker that takes it."""
    return any(isinstance(leaf, LateRange) for leaf in tf.nest.flatten(args))
