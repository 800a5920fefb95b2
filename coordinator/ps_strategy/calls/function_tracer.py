"""Traces scheduled functions, once for each kind of arguments, and makes calls of the traced functions.

schedule(fn, args) --> TraceCache.find: the same kind of call was made before --> ScheduledCall
                            |  not known
                            v
                       call_of: checked arguments --> TensorFlow looks the trace up, or traces --> ScheduledCall

TensorFlow's own lookup takes longer than the rest of `schedule`, so a cache is asked first.
"""

import array
import concurrent.futures
import contextlib
import functools
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from coordinator.data.ranges import LateRange, PositionRange, position_ranges
from coordinator.future import Future
from coordinator.owned_values import OwnedValues
from coordinator.ps_strategy.calls.traced_function import ScheduledCall, TracedFunction, refuse_unknown_shapes
from coordinator.ps_strategy.fusing.repeated_function import is_stackable, spec_of
from coordinator.ps_strategy.membership.cluster_definition import CLIENT_JOB
from coordinator.ps_strategy.per_worker.dataset import PerWorkerDataset, PerWorkerIterator, tracing_type
from coordinator.ps_strategy.per_worker.resource import PerWorkerHandles
from coordinator.ps_strategy.tensorflow_internals.functions import (
    captured_inputs,
    compiled_calls,
    is_compiled,
    named_arguments,
    untraced_copy,
    with_defaults,
)
from coordinator.ps_strategy.tensorflow_internals.handles import is_server_handle, owner_of_handle
from coordinator.ps_strategy.tensorflow_internals.process import MADE_BEFORE, is_from_before
from coordinator.runtime import FusionKey

_logger = logging.getLogger("coordinator")

# A function with this number of traces is reported. A trace takes tens of milliseconds or more, and a function that is
# called in several ways has fewer traces.
_MANY = 20
_MOST_CAUSES = 3
_EXAMPLES = 3
_LONGEST_EXAMPLE = 60
_SHOWN_BY_VALUE = (bool, int, float, complex, str, bytes, type(None))
# A property of one argument that a trace depends on: the argument's place in Python's notation, the name of the
# property, advice for the user, and the property's value as a text and an identity.
_Trait = tuple[str, str, str, str, int]


class RetraceWarnings:
    """Counts the traces of each function, and warns once of a function with many traces and of their causes.

    Arguments are recorded only for a new trace: other calls cost nothing. Functions and arguments are not kept alive.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By function: the traits of each trace; None once a warning was logged.
        self._traces: weakref.WeakKeyDictionary[Any, list[list[_Trait]] | None] = weakref.WeakKeyDictionary()

    def forget(self) -> None:
        """Counts from 0 again, because all functions will be retraced."""
        with self._lock:
            for traces in self._traces.values():
                if traces is not None:
                    traces.clear()

    def note(self, function: Any, name: str, arguments: Mapping[str, Any]) -> None:
        """Records a trace of a `tf.function` with arguments by parameter; logs a warning at the twentieth trace."""
        with self._lock:
            if self._traces.get(function, ()) is None:
                return
        # No lock is held here, because `repr` of an argument may run code of the program.
        traits = [trait for key, value in arguments.items() for trait in _traits(key, value)]
        with self._lock:
            traces = self._traces.setdefault(function, [])
            if traces is None:
                return
            traces.append(traits)
            if len(traces) < _MANY:
                return
            self._traces[function] = None
        text = "The function %r was traced %d times, and a trace takes longer than many calls.%s"
        _logger.warning(text, name, _MANY, _causes(traces))


def _causes(traces: list[list[_Trait]]) -> str:
    values: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    for place, what, advice, text, identity in itertools.chain(*traces):
        values.setdefault((place, what), {})[text, identity] = advice
    most = max(map(len, values.values()), default=1)
    differing = [(key, advices) for key, advices in values.items() if len(advices) == most > 1]
    causes = ""
    for (place, what), advices in differing[:_MOST_CAUSES]:
        examples = ", ".join(text for text, _ in itertools.islice(advices, _EXAMPLES))
        advice = next(iter(advices.values()))
        causes += f" The {what} of its argument {place!r} differs ({examples}, ...). {advice}"
    return causes


def _traits(place: str, value: Any) -> Iterator[_Trait]:
    if isinstance(value, list | tuple | dict):
        text = f"{type(value).__name__} of {len(value)}"
        yield place, "structure", "Pass one of the same structure each time.", text, 0
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _traits(f"{place}[{key!r}]", part)
    elif isinstance(value, _SHOWN_BY_VALUE):
        instead = "" if isinstance(value, str | bytes) else " or a NumPy value"
        advice = f"Pass tf.constant({place}){instead}: one trace serves all values of a tensor."
        yield place, "Python value", advice, _short(repr(value)), hash(value)
    elif hasattr(value, "dtype") and hasattr(value, "shape"):
        advice = "Give the tf.function an input_signature or reduce_retracing=True, or pad the argument."
        yield place, "shape", advice, str(value.shape), 0
        yield place, "dtype", "Convert it to one dtype.", getattr(value.dtype, "name", str(value.dtype)), 0
    elif hasattr(value, "element_spec"):
        advice, text = "Give the elements of all datasets the same shapes and dtypes.", str(value.element_spec)
        yield place, "element_spec", advice, _short(text), hash(text)
    else:
        yield place, "identity", "Pass the same object each time.", type(value).__name__, id(value)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_EXAMPLE else text[: _LONGEST_EXAMPLE - 3] + "..."


# The most entries of a function; a further entry drops all others. Each value of an argument that is a Python number
# has a separate trace and entry. Each iterator has a separate entry.
_MAX_TRACES = 64
# The kinds of cached arguments that a program may change after it has scheduled a call.
_MUTABLE = frozenset({np.ndarray, tuple, list, dict})
# In bytes. Converting an array to a tensor takes some microseconds more than copying the array, but saves a copy later.
_LARGE = 2**18
_LITERALS = frozenset({int, float, bool, str, bytes, type(None)})


class _Trace(NamedTuple):
    """A cached trace: the function, and the common part of its calls."""

    function: TracedFunction
    # The per-worker resources and variables among the arguments.
    resources: Sequence[weakref.ref[Any]]
    defaults: Sequence[Any]
    default_iterators: Sequence[PerWorkerIterator]
    fusion_key: FusionKey | None
    # Whether an argument has a range of examples. If not, arguments of later calls are not searched for ranges.
    takes_ranges: bool


class TraceCache:
    """Cached traces by function and kind of arguments, with the default values of omitted arguments.

    Only arguments of a few kinds are cached, so that a key contains everything that a trace may depend on. Per-worker
    iterators, per-worker datasets and variables are cached by id. Functions, traces and resources are not kept alive.
    """

    def __init__(self) -> None:
        self._traces: OwnedValues[dict[Hashable, _Trace]] = OwnedValues()

    def clear(self) -> None:
        self._traces.clear()

    def find(self, function: Any, args: Any, kwargs: Any = None) -> ScheduledCall | None:
        """Returns a call of a function with these arguments; None if such a call is not cached.

        `function`, `args` and `kwargs` may be any objects, not checked yet. Calls with keywords are not cached.
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
        for reference, resource in zip(trace.resources, resources, strict=True):
            if reference() is not resource:
                # The entry was made for another object, which had the same id.
                return None
        key = trace.fusion_key
        if remote and key is not None:
            key = FusionKey(key.function, (key.arguments, *remote))
        iterators = (*iterators_among(resources), *trace.default_iterators) if resources else trace.default_iterators
        args = [own_copy(value) if type(value) in _MUTABLE else value for value in args]
        followers = followers_of(args, {}) if trace.takes_ranges else ()
        args = (*args, *trace.defaults)
        return ScheduledCall(trace.function, args, {}, iterators, key, followers=followers)

    def add(self, function: Any, args: Sequence[Any], traced: TracedFunction, defaults: Sequence[Any]) -> None:
        """Caches the trace of a call with these positional arguments, if it is known which calls may use the trace.

        `defaults` are the values of the omitted arguments after `args`.
        """
        resources: list[Any] = []
        key = _argument_key(tuple(args), resources, [])
        if key is None or not tf.executing_eagerly():
            return
        traces = self._traces.setdefault(function, {})
        if len(traces) >= _MAX_TRACES:
            traces.clear()
        # Calls that find this entry agree in everything that the trace depends on, so one new object is their key.
        fusion_key = FusionKey(traced.token, object()) if traced.may_be_fused and not are_late(args) else None
        iterators = iterators_among(tf.nest.flatten(list(defaults)))
        takes_ranges = bool(position_ranges(args, {}))
        traces[key] = _Trace(traced, [*map(weakref.ref, resources)], defaults, iterators, fusion_key, takes_ranges)


def own_copy(value: Any) -> Any:
    """Copies an argument, a nested structure, so that later changes by the program do not affect the call."""
    kind = type(value)
    if kind in (tuple, list):
        return kind(map(own_copy, value))
    if kind is dict:
        return {key: own_copy(part) for key, part in value.items()}
    # `tf.nest` treats some of these types as structures. In a call they are arrays of numbers.
    if isinstance(value, bytearray | memoryview | array.array) or not tf.nest.is_nested(value):
        return _copied_leaf(value)
    return tf.nest.map_structure(_copied_leaf, value)


def _copied_leaf(value: Any) -> Any:
    if type(value) is np.ndarray:
        if value.nbytes < _LARGE or value.dtype.kind not in "biufc":
            return value.copy()
        # The call needs a tensor on the client. If the tensor is created here, the call copies nothing.
        with tf.device(None), tf.device("/device:CPU:0"):
            return tf.constant(value)
    if isinstance(value, bytearray):
        return bytes(value)
    # Variables are passed by reference; tensors, numbers and ranges of positions never change.
    is_constant = tf.is_tensor(value) or isinstance(value, tf.Variable | np.generic | PositionRange)
    is_array = isinstance(value, memoryview | array.array) or hasattr(value, "__array__")
    if is_constant or hasattr(value, "__tf_tensor__") or not is_array:
        return value
    # Arrays of other libraries are copied to NumPy arrays.
    return np.array(np.asanyarray(value), subok=True)


def followers_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Callable[[Future], object]]:
    """Returns the callbacks by which the ranges of examples among the arguments follow the future of their call."""
    return [positions.follow for positions in position_ranges(args, kwargs)]


def iterators_among(values: Sequence[Any]) -> list[PerWorkerIterator]:
    """Returns the per-worker iterators in a flat sequence."""
    return [value for value in values if isinstance(value, PerWorkerIterator)]


def _argument_key(value: Any, resources: list[Any], remote: list[int]) -> tuple[Any, ...] | None:
    """Returns everything in an argument, or in a part of one, that a trace may depend on; None if this is not known.

    Appends the argument's per-worker resources and variables to `resources`, and the ids of its tensors on workers and
    parameter servers to `remote`, because calls are fused only if they share these tensors.
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
    """Returns whether the worker that takes a call with these arguments reads their examples ahead."""
    return any(isinstance(leaf, LateRange) for leaf in tf.nest.flatten(args))


# The kinds of resources on the client that workers may use. Only the `repr` of a resource names its kind.
_USED_ON_CLIENT = ("LookupInterface", "SummaryWriterInterface")

# Returns the scope for tracing. Each call gets it, because the tracer must not keep the owner of the scope alive.
_Scope = Callable[[], contextlib.AbstractContextManager[Any]]


def _in_common(leaf: Any) -> Hashable:
    if not is_stackable(leaf):
        # Calls keep their arguments alive, so that no other object has this id.
        return id(leaf)
    return type(leaf), tuple(getattr(leaf, "shape", ()))


def _checked_arguments(
    args: Any, kwargs: Any, handles: PerWorkerHandles
) -> tuple[Sequence[Any], Mapping[str, Any], list[Future]]:
    """Checks the arguments of a call; returns the arguments, and their futures, which must be of this strategy."""
    args = () if args is None else args
    kwargs = {} if kwargs is None else kwargs
    if not isinstance(args, list | tuple):
        raise TypeError(f"args must be a list or tuple of the function's arguments, got {type(args).__name__}.")
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a dict of the function's keyword arguments, got {type(kwargs).__name__}.")
    futures: list[Any] = []
    for leaf in tf.nest.flatten((args, kwargs)):
        if not isinstance(leaf, concurrent.futures.Future):
            continue
        origin = leaf.origin if isinstance(leaf, Future) else None
        if not isinstance(origin, TracedFunction) or origin.handles is not handles:
            raise ValueError(
                f"{leaf!r} is an argument, but not a future of this strategy. Wait for it and pass its value: "
                "strategy.schedule(fn, args=(future.result(),))."
            )
        futures.append(leaf)
    return args, kwargs, futures


# Marks a copy in `_copies` that must be replaced by a new copy before the function is traced again.
_OUTDATED = object()


class FunctionTracer:
    """Traces the functions of one strategy. `cache` finds the calls of functions that were traced before."""

    def __init__(self, handles: PerWorkerHandles) -> None:
        self._handles = handles
        # By scheduled function: the copy that is traced in its place, or None for the function itself. A copy is made
        # only when it is needed, because the copy of a method would keep the method and its object alive.
        self._copies: OwnedValues[Any] = OwnedValues()
        self.cache = TraceCache()
        self._accepted: weakref.WeakSet[Any] = weakref.WeakSet()
        self._trace_counts = RetraceWarnings()
        # By scheduled function: the traces, with the workers' copies, live as long as the `tf.function`.
        self._traced: OwnedValues[dict[Any, TracedFunction]] = OwnedValues()

    def reset(self) -> None:
        """Has every function traced again when it is scheduled next."""
        # Other threads may schedule functions: the iteration begins by copying all references in one step.
        for function in self._copies:
            self._copies[function] = _OUTDATED
        self.cache.clear()
        self._traced.clear()
        self._trace_counts.forget()

    def call_of(self, fn: Any, args: Any, kwargs: Any, scope: _Scope) -> ScheduledCall:
        """Returns the call of a scheduled function; raises the errors of `schedule`, and of the function's trace."""
        args, kwargs, futures = _checked_arguments(args, kwargs, self._handles)
        args, kwargs = own_copy(tuple(args)), own_copy(dict(kwargs))
        traced_with = args, kwargs
        if futures:
            traced_with = tf.nest.map_structure(
                lambda leaf: spec_of(leaf) if isinstance(leaf, Future) else leaf, (tuple(args), dict(kwargs))
            )
        function = self.trace(fn, *traced_with, scope)
        _refuse_handles(function)
        all_args, all_kwargs = with_defaults(fn, args, kwargs)
        is_positional = not (kwargs or all_kwargs)
        if is_positional and isinstance(fn, tf.types.experimental.PolymorphicFunction):
            self.cache.add(fn, args, function, all_args[len(args) :])
            if call := self.cache.find(fn, args):
                return call
        leaves = tf.nest.flatten((all_args, all_kwargs))
        iterators = iterators_among(leaves)
        key = None
        if not futures and function.may_be_fused and not are_late(leaves):
            key = FusionKey(function.token, tuple(map(_in_common, leaves)))
        followers = followers_of(args, kwargs)
        return ScheduledCall(function, all_args, all_kwargs, iterators, key, futures, followers)

    def trace(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], scope: _Scope) -> TracedFunction:
        """Traces a function for these arguments, or returns its former trace. Raises the errors of `call_of`."""
        concrete = fn
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            copy = self._copies.setdefault(fn, None)
            if copy is _OUTDATED:
                copy = self._copies[fn] = untraced_copy(fn)
            # A function with an input signature refuses per-worker iterators and datasets, but accepts their types.
            types = tf.nest.map_structure(
                lambda value: value.ranges.spec if isinstance(value, LateRange) else tracing_type(value),
                (tuple(args), dict(kwargs)),
            )
            with scope():
                concrete = (copy or fn).get_concrete_function(*types[0], **types[1])
        elif not isinstance(fn, tf.types.experimental.ConcreteFunction):
            raise TypeError(
                f"schedule takes a tf.function or a concrete function, got {fn!r}. Decorate the function with "
                "@tf.function, or wrap it: strategy.schedule(tf.function(fn), ...)."
            )
        if concrete not in self._accepted:
            _refuse_compiled(concrete)
            self._refuse_client_resources(concrete)
            refuse_unknown_shapes(str(concrete.graph.name), tf.nest.flatten((args, kwargs)))
            self._accepted.add(concrete)
        if concrete is fn:
            return TracedFunction(concrete, self._handles)
        traced = self._traced.setdefault(fn, {})
        if concrete not in traced:
            traced[concrete] = TracedFunction(concrete, self._handles)
            arguments = named_arguments(fn, args, kwargs)
            self._trace_counts.note(fn, traced[concrete].name, arguments)
        return traced[concrete]

    def _refuse_client_resources(self, concrete: Any) -> None:
        """Raises ValueError if a function uses a resource that is only on the client, such as a queue or a dataset."""
        for tensor in captured_inputs(concrete):
            if tensor.dtype not in (tf.resource, tf.variant) or tf.is_symbolic_tensor(tensor):
                continue
            if is_from_before(tensor):
                raise ValueError(f"The function {concrete.graph.name!r} cannot run: {MADE_BEFORE}")
            if tensor.dtype == tf.variant:
                # Only the `repr` of a variant names its kind. Other variants, such as lists of tensors, can be sent.
                if "::Dataset" in repr(tensor):
                    raise ValueError(
                        f"The function {concrete.graph.name!r} reads a tf.data.Dataset of the client, where workers "
                        "cannot reach it. Pass it as an argument, strategy.experimental_distribute_dataset(dataset) or "
                        "iter() of that; or make it inside of the function."
                    )
                continue
            is_known = owner_of_handle(tensor) is not None or self._handles.resource_for(tensor) is not None
            is_on_client = tf.DeviceSpec.from_string(tensor.device).job == CLIENT_JOB
            if is_on_client and not is_known and not any(kind in repr(tensor) for kind in _USED_ON_CLIENT):
                raise ValueError(
                    f"The function {concrete.graph.name!r} uses a resource of the client that workers cannot use, such "
                    "as a queue or an iterator. Create it on each worker: strategy.create_per_worker_resource(lambda: "
                    "tf.queue.FIFOQueue(...)); of a dataset pass a per-worker iterator as an argument."
                )


def _refuse_handles(function: TracedFunction) -> None:
    """Raises TypeError if a function returns a handle: sending it to the client would end the worker's process."""
    for tensor in function.concrete.outputs:
        if tensor.dtype in (tf.resource, tf.variant):
            raise TypeError(
                f"The function {function.name!r} returns {tensor.name!r}, which is no value: a handle of a variable, "
                "iterator, table or queue, a dataset, an optional or a list of tensors. It cannot leave the worker. "
                "Return values: variable.read_value(), next(iterator), array.stack(); and pass variables and "
                "iterators to functions as arguments."
            )


def _refuse_compiled(concrete: Any) -> None:
    """Raises ValueError if XLA compiles the function, or a function that it calls with remote variables.

    XLA compiles for one device of one machine. A worker would refuse the function without naming the reason.
    """
    if is_compiled(concrete):
        raise ValueError(
            f"The function {concrete.graph.name!r} was scheduled and has jit_compile=True. XLA compiles "
            "for one machine, and a scheduled function is sent to another one and uses variables on yet others. "
            "Leave jit_compile out, and give it to a function of tensors that this one calls."
        )
    for name, handle in compiled_calls(concrete, is_server_handle):
        variable = owner_of_handle(handle)
        raise ValueError(
            f"The function {name!r}, which {concrete.graph.name!r} calls, has jit_compile=True and uses "
            f"the variable {getattr(variable, 'name', handle)!r} on {handle.device}. XLA cannot reach another "
            "machine. Read the variable outside of the compiled function, pass its value as an argument, and "
            "assign what the function returns."
        )
