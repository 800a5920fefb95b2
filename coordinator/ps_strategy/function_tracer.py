"""Turns what is scheduled into calls of traced functions, each function traced once for each kind of arguments.

A call that was made before, of arguments that are known exactly, is found without TensorFlow's help (`KnownTraces`);
any other is TensorFlow's to look up or to trace.
"""

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.future import Future
from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.calls.retraced_functions import RetracedFunctions
from coordinator.ps_strategy.calls.scheduled_call import ScheduledCall
from coordinator.ps_strategy.calls.traced_function import TracedFunction
from coordinator.ps_strategy.compiled_functions import CompiledFunctions
from coordinator.ps_strategy.fresh_functions import FreshFunctions
from coordinator.ps_strategy.known_traces import KnownTraces
from coordinator.ps_strategy.per_worker.resource import PerWorkerHandles
from coordinator.ps_strategy.schedule_arguments import ScheduleArguments

# Makes the scope in which functions are traced; given to each call, since what makes it owns the tracer.
_Scope = Callable[[], contextlib.AbstractContextManager[Any]]


class FunctionTracer:
    """Traces the functions of one strategy.

    Args:
      handles: what stands for per-worker resources.
    """

    def __init__(self, handles: PerWorkerHandles) -> None:
        self._handles = handles
        self._fresh = FreshFunctions()
        self._known = KnownTraces()
        self._compiled = CompiledFunctions()
        self._retraced = RetracedFunctions()
        # By the function that was scheduled, which none of them keeps alive: what was made for one of them on the
        # workers serves as long as that lives. A concrete function would keep itself alive.
        self._traced: weakref.WeakKeyDictionary[Any, dict[Any, TracedFunction]] = weakref.WeakKeyDictionary()

    def begin_anew(self) -> None:
        """From now on nothing counts as traced."""
        self._fresh.begin_anew()
        self._known.forget()
        self._traced.clear()
        self._retraced.forget()

    def call_of(self, fn: Any, args: Any, kwargs: Any, scope: _Scope) -> tuple[ScheduledCall, Sequence[Future]]:
        """The call of a function that was scheduled, and the futures among its arguments.

        Raises:
          Exception: see `ParameterServerStrategy.schedule`; what the function raises while it is traced, too.
        """
        known = None if kwargs else self._known.find(fn, () if args is None else args)
        if known is not None:
            return ScheduledCall(*known, {}), ()
        given = ScheduleArguments.of(args, kwargs, self._handles)
        function = self.trace(fn, *given.to_trace(), scope)
        all_args, all_kwargs = tensorflow_internals.with_defaults(fn, given.args, given.kwargs)
        is_positional = not (given.kwargs or all_kwargs)
        if is_positional and isinstance(fn, tf.types.experimental.PolymorphicFunction):
            self._known.remember(fn, given.args, function, all_args[len(given.args) :])
        return ScheduledCall(function, all_args, all_kwargs, takes_futures=bool(given.futures)), given.futures

    def trace(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], scope: _Scope) -> TracedFunction:
        """What a function is traced into for these arguments.

        Raises:
          TypeError: it is no such function.
          ValueError: XLA is to compile what it cannot.
        """
        concrete = fn
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            with scope():
                concrete = self._fresh.of(fn).get_concrete_function(*args, **kwargs)
        elif not isinstance(fn, tf.types.experimental.ConcreteFunction):
            raise TypeError(
                f"schedule takes a tf.function or a concrete function, got {fn!r}. Decorate the function with "
                "@tf.function, or wrap it: strategy.schedule(tf.function(fn), ...)."
            )
        self._compiled.check(concrete)
        if concrete is fn:
            return TracedFunction(concrete, self._handles)
        traced = self._traced.setdefault(fn, {})
        if concrete not in traced:
            traced[concrete] = TracedFunction(concrete, self._handles)
            arguments = tensorflow_internals.named_arguments(fn, args, kwargs)
            self._retraced.note(fn, traced[concrete].name, arguments)
        return traced[concrete]
