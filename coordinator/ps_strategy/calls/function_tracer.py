"""Turns what is scheduled into calls of traced functions; each function is traced once for each kind of arguments.

schedule(fn, args) --> TraceCache.find: the same kind of call was made before --> ScheduledCall
                            |  not known
                            v
                       call_of: checked arguments --> TensorFlow looks the trace up, or traces --> ScheduledCall
"""

import concurrent.futures
import contextlib
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.data.late_ranges import LateRange
from coordinator.future import Future
from coordinator.owned_values import OwnedValues
from coordinator.ps_strategy.calls.retrace_warnings import RetraceWarnings
from coordinator.ps_strategy.calls.trace_cache import (
    TraceCache,
    are_late,
    followers_of,
    input_of,
    iterators_among,
    own_copy,
)
from coordinator.ps_strategy.calls.traced_function import ScheduledCall, TracedFunction, refuse_unknown_shapes
from coordinator.ps_strategy.fusing.repeated_function import is_stackable
from coordinator.ps_strategy.fusing.stacked_outputs import spec_of
from coordinator.ps_strategy.membership.cluster_definition import CLIENT_JOB
from coordinator.ps_strategy.per_worker.dataset import tracing_type
from coordinator.ps_strategy.per_worker.resource import PerWorkerHandles
from coordinator.ps_strategy.tensorflow_internals.calls import (
    captured_inputs,
    named_arguments,
    untraced_copy,
    with_defaults,
)
from coordinator.ps_strategy.tensorflow_internals.compilation import compiled_calls, is_compiled
from coordinator.ps_strategy.tensorflow_internals.handles import is_on_parameter_server, owner_of_handle
from coordinator.ps_strategy.tensorflow_internals.process import MADE_BEFORE, is_from_before
from coordinator.runtime import FusionKey

# Kinds of resources that workers may use on the client; the kind is only in the text of a resource.
_USED_ON_CLIENT = ("LookupInterface", "SummaryWriterInterface")

# Returns the scope in which functions are traced; passed to each call, since what makes it owns the tracer.
_Scope = Callable[[], contextlib.AbstractContextManager[Any]]


def _type_of(value: Any) -> Any:
    return value.ranges.spec if isinstance(value, LateRange) else tracing_type(value)


def _fusion_key_of(function: TracedFunction, leaves: Sequence[Any]) -> FusionKey | None:
    """Returns the fusion key: calls with equal keys may run as one.

    Args:
      function: the function.
      leaves: the flattened arguments, defaults included, without futures.
    """
    if not function.may_be_fused or are_late(leaves):
        return None
    return FusionKey(function.token, tuple(map(_in_common, leaves)))


def _in_common(leaf: Any) -> Hashable:
    if not is_stackable(leaf):
        # Calls keep their arguments alive, so no other object has this identity meanwhile.
        return id(leaf)
    return type(leaf), tuple(getattr(leaf, "shape", ()))


def _checked_arguments(
    args: Any, kwargs: Any, handles: PerWorkerHandles
) -> tuple[Sequence[Any], Mapping[str, Any], list[Future]]:
    """Checks the arguments of a call, and returns them with the futures among them.

    Args:
      args: a list or tuple, or None for none.
      kwargs: a dict, or None for none.
      handles: those of the strategy, by which its own futures are known.

    Raises:
      TypeError: `args` or `kwargs` is something else.
      ValueError: there is a future among them that is not of this strategy.
    """
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


# In place of a copy: one is to be made before the function is traced again.
_OUTDATED = object()


class FunctionTracer:
    """Traces the functions of one strategy.

    Args:
      handles: the strategy's per-worker resources.

    Attributes:
      cache: finds the calls of functions that were traced before.
    """

    def __init__(self, handles: PerWorkerHandles) -> None:
        self._handles = handles
        # What is traced in place of each function that was scheduled: a copy, or None for itself. A copy is made when
        # it is needed: it may refer to the object whose method the function is, and would keep both alive.
        self._copies: OwnedValues[Any] = OwnedValues()
        self.cache = TraceCache()
        self._accepted: weakref.WeakSet[Any] = weakref.WeakSet()
        self._trace_counts = RetraceWarnings()
        # By scheduled function: the workers' copies live as long as the `tf.function`.
        self._traced: OwnedValues[dict[Any, TracedFunction]] = OwnedValues()

    def reset(self) -> None:
        """Has every function traced again when it is scheduled next."""
        # The references are copied in one step, since functions may be scheduled meanwhile.
        for function in self._copies:
            self._copies[function] = _OUTDATED
        self.cache.clear()
        self._traced.clear()
        self._trace_counts.forget()

    def call_of(self, fn: Any, args: Any, kwargs: Any, scope: _Scope) -> ScheduledCall:
        """Traces a function that is scheduled; returns the call of it.

        Raises:
          Exception: see `ParameterServerStrategy.schedule`; what the function raises while it is traced, too.
        """
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
        key = None if futures else _fusion_key_of(function, leaves)
        return ScheduledCall(
            function,
            all_args,
            all_kwargs,
            iterators,
            tuple(map(input_of, iterators)),
            key,
            futures=futures,
            followers=followers_of(args, kwargs),
        )

    def trace(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], scope: _Scope) -> TracedFunction:
        """Traces a function for these arguments, or returns what it was traced into before.

        Raises:
          TypeError: it is no such function.
          ValueError: the function has `jit_compile=True`, or calls one that has and uses a remote variable; or it uses
            a variable whose shape is not known.
        """
        concrete = fn
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            copy = self._copies.setdefault(fn, None)
            if copy is _OUTDATED:
                copy = self._copies[fn] = untraced_copy(fn)
            # A function with an input signature accepts no other objects in place of iterators and datasets.
            types = tf.nest.map_structure(_type_of, (tuple(args), dict(kwargs)))
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
        """Raises ValueError if a function uses what is on the client alone, such as a queue or a dataset."""
        for tensor in captured_inputs(concrete):
            if tensor.dtype not in (tf.resource, tf.variant) or tf.is_symbolic_tensor(tensor):
                continue
            if is_from_before(tensor):
                raise ValueError(f"The function {concrete.graph.name!r} cannot run: {MADE_BEFORE}")
            if tensor.dtype == tf.variant:
                # The kind is only in the text; workers can be sent others, such as lists of tensors.
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
    """Raises TypeError if a function returns what exists on its worker alone.

    To send the handle of a resource to the client ends the worker's process, without an error.
    """
    for tensor in function.concrete.outputs:
        if tensor.dtype in (tf.resource, tf.variant):
            raise TypeError(
                f"The function {function.name!r} returns {tensor.name!r}, which is no value: a handle of a variable, "
                "iterator, table or queue, a dataset, an optional or a list of tensors. It cannot leave the worker. "
                "Return values: variable.read_value(), next(iterator), array.stack(); and pass variables and "
                "iterators to functions as arguments."
            )


def _refuse_compiled(concrete: Any) -> None:
    """Raises ValueError if the function, or a function that it calls with remote variables, is compiled by XLA.

    XLA compiles for one device of one machine; a worker would refuse these functions with an error that does not say
    why.
    """
    if is_compiled(concrete):
        raise ValueError(
            f"The function {concrete.graph.name!r} was scheduled and has jit_compile=True. XLA compiles "
            "for one machine, and a scheduled function is sent to another one and uses variables on yet others. "
            "Leave jit_compile out, and give it to a function of tensors that this one calls."
        )
    for name, handle in compiled_calls(concrete, is_on_parameter_server):
        variable = owner_of_handle(handle)
        raise ValueError(
            f"The function {name!r}, which {concrete.graph.name!r} calls, has jit_compile=True and uses "
            f"the variable {getattr(variable, 'name', handle)!r} on {handle.device}. XLA cannot reach another "
            "machine. Read the variable outside of the compiled function, pass its value as an argument, and "
            "assign what the function returns."
        )
