"""`schedule`, `join`, `done` and `local_results` in a `tf.function` that the program calls on the client.

    @tf.function
    def train(steps):                                     when it is traced          when it runs
        for _ in tf.range(steps):
            future = strategy.schedule(step, (iterator,))   traces `step`              schedules a call
        strategy.join()                                                              waits
        return strategy.local_results(future)               the types of the results   the results

Each call is an operation that calls Python on the client. They run in the order of the program, with all else that has
effects; see `barriers_in_order`.
"""

import concurrent.futures
import contextlib
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.errors import StrategyClosedError
from coordinator.future import Future
from coordinator.ps_strategy.calls.client_arguments import ClientArguments
from coordinator.ps_strategy.calls.client_call import ClientCall, ClientCalls
from coordinator.ps_strategy.calls.function_tracer import FunctionTracer
from coordinator.ps_strategy.calls.graph_future import Futures, GraphFuture
from coordinator.ps_strategy.fusing.stacked_outputs import spec_of, stackable
from coordinator.ps_strategy.membership.bounded_calls import on_own_thread
from coordinator.ps_strategy.tensorflow_internals.client_functions import (
    barriers_in_order,
    call_time_values,
    plain_loops_as,
    python_operation,
)
from coordinator.workers.scheduler import Scheduler

# The number of a call, and the handle of its queue.
_CALL = (tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.resource))
# How soon it is noticed that data cannot end, in seconds.
_MOMENT = 0.05
# What a loop may say besides, to be scheduled as many runs.
_LOOP_OPTIONS = frozenset({"args", "kwargs", "worker", "timeout"})
_HANDLE, _BOOL = tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.bool)


def _components(result: Any) -> list[Any]:
    """Returns the components of a result, or of its type, that are not None."""
    return [part for part in tf.nest.flatten(result, expand_composites=True) if part is not None]


def _stacked_type(result_type: Any, steps: Any) -> Any:
    """Returns the type of the result of many runs."""
    first = tf.TensorShape([None if tf.is_tensor(steps) else steps])
    return tf.nest.map_structure(
        lambda each: each and tf.TensorSpec(first.concatenate(each.shape), each.dtype), result_type
    )


class ClientFunctions:
    """What functions on the client call.

    Args:
      scheduler: of the strategy.
      tracer: traces what is scheduled.
      scope: that in which it is traced.
      schedule: that of the strategy, which is not kept alive.

    Attributes:
      futures: those whose handles are in use.
      device: the client's, on which all operations are that are added.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tracer: FunctionTracer,
        scope: Callable[[], Any],
        schedule: Callable[..., Future],
    ) -> None:
        self._scheduler = scheduler
        self._tracer = tracer
        self._scope = scope
        self._schedule = weakref.WeakMethod(schedule)
        self._waits = scheduler.queue.interruptible
        self._calls = ClientCalls(self._waits.wake)
        self.device = self._calls.device
        self.futures = Futures()
        self._types: list[Any] = []

    @contextlib.contextmanager
    def open(self) -> "Iterator[ClientFunctions]":
        """A scope in which functions on the client may schedule."""
        with barriers_in_order(self), plain_loops_as(self._schedule_loop), self._calls.open():
            yield self

    def result_or_none(self, value: Any) -> Any:
        """Waits for the result of a future, also of a graph; None if it failed. Returns other values as they are."""
        future = self.futures[value.handle] if isinstance(value, GraphFuture) else value
        return future.result_or_none() if isinstance(future, Future) else value

    def schedule(
        self, fn: Any, args: Any = None, kwargs: Any = None, *, steps: Any = None, is_used: bool = True, **options: Any
    ) -> GraphFuture:
        """Adds an operation that calls `ParameterServerStrategy.schedule`; `fn` is traced now.

        Args:
          fn: as there.
          args: as there.
          kwargs: as there.
          steps: as there; may be a tensor.
          is_used: False to drop the results of many runs, and to wait for them if their data may end, since a loop that
            schedules until then is to end with the error.
          **options: as there.
        """
        arguments = self._arguments(args, kwargs, {"steps": steps, **options})
        traced = self._traced(fn, arguments)
        inputs = traced.inputs

        def schedule(values: Sequence[Any]) -> Future:
            args, kwargs, options = arguments.with_values(values)
            options = {name: getattr(value, "item", lambda value=value: value)() for name, value in options.items()}
            future = self._present_schedule()(fn, args, kwargs, **options)
            if not is_used:
                future.discard()
            return future

        def may_end() -> bool:
            return not is_used and any(each.is_finite is not False for each in inputs)

        def attempt(call: ClientCall, *values: Any) -> list[Any]:
            if self._waits.is_free and not may_end():
                return [self.futures.add(schedule(values)), False]
            call.begin_wait(lambda: self._schedule_when_free(call, lambda: schedule(values), may_end))
            return [np.int32(-1), True]

        def wait() -> Any:
            self._wakeup()
            return self._python(lambda call: [self.futures.add(call.end_wait())], [], [_HANDLE])[0]

        handle, is_waiting = self._python(attempt, arguments.inputs, [_HANDLE, _BOOL])
        handle = tf.cond(is_waiting, wait, lambda: handle)
        result_type = traced.function.result_spec
        return GraphFuture(handle, self._number_of(result_type if steps is None else _stacked_type(result_type, steps)))

    def _schedule_loop(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], count: Any) -> bool:
        """Adds an operation that schedules many runs, in place of a loop that schedules one in each iteration.

        Args:
          function: what the loop calls.
          args: its positional arguments.
          kwargs: its keyword arguments.
          count: the number of iterations.

        Returns:
          False if it calls anything else, or if many runs would not be the same.
        """
        if function != self._schedule() or not self._scheduler.stops_on_error or not kwargs.keys() <= _LOOP_OPTIONS:
            return False
        try:
            call = inspect.signature(self.schedule).bind(*args, **kwargs).arguments
            stackable(self._traced(call["fn"], self._arguments(call.get("args"), call.get("kwargs"), {})))
        except Exception:  # noqa: BLE001 - the loop raises it
            return False

        def schedule() -> bool:
            runs = tf.cast(count, tf.int64)
            function.__self__.extended.on_client("schedule", *args, **kwargs, steps=runs, is_used=False)
            return True

        with tf.device(None), tf.device(self.device):
            tf.autograph.experimental.do_not_convert(tf.cond)(count > 0, schedule, lambda: False)
        return True

    def join(self, timeout: float | None = None) -> None:
        """Adds operations that wait as `ParameterServerStrategy.join` does."""

        def begin(call: ClientCall) -> list[Any]:
            call.begin_wait(lambda: self._waits.wait_settled(timeout, call.cut.done))
            return []

        def end(call: ClientCall) -> list[Any]:
            call.end_wait()
            return []

        self._python(begin, [], [])
        self._wakeup()
        self._python(end, [], [])

    def done(self) -> Any:
        """Adds an operation that calls `ParameterServerStrategy.done`; returns its result, a bool scalar."""
        return self._python(lambda call: [self._scheduler.done()], [], [_BOOL])[0]

    def local_results(self, structure: Any) -> Any:
        """Adds operations that wait for futures; returns the structure with their results, which are tensors."""
        found = [leaf for leaf in tf.nest.flatten(structure) if isinstance(leaf, GraphFuture | Future)]
        if not found:
            return structure
        futures = ClientArguments(found, self.futures, self._types)
        types = [spec_of(each) if isinstance(each, Future) else each for each in futures.specs]
        specs = _components(types)

        def begin(call: ClientCall, *handles: Any) -> list[Any]:
            awaited = futures.with_values(handles)
            is_waiting = not all(map(_has_result, awaited))
            if is_waiting:
                call.begin_wait(lambda: self._wait_for(awaited, call.cut))
            return [is_waiting]

        def end(call: ClientCall, *handles: Any) -> list[Any]:
            call.end_wait()
            parts = [part for future in futures.with_values(handles) for part in _components(future.result())]
            return [part.numpy() if tf.is_tensor(part) else part for part in parts]

        tf.cond(self._python(begin, futures.inputs, [_BOOL])[0], self._wakeup, lambda: False)
        values = iter(self._python(end, futures.inputs, specs))
        results = iter([tf.nest.map_structure(lambda spec: spec and _packed(spec, values), each) for each in types])
        return tf.nest.map_structure(
            lambda leaf: next(results) if isinstance(leaf, GraphFuture | Future) else leaf, structure
        )

    def _arguments(self, args: Any, kwargs: Any, options: Any) -> ClientArguments:
        given = (() if args is None else args, {} if kwargs is None else kwargs, options)
        return ClientArguments(given, self.futures, self._types)

    def _traced(self, fn: Any, arguments: ClientArguments) -> Any:
        """Returns a call of a function, traced on a thread that is in no graph: gradients are not traced in others."""
        return on_own_thread(
            "coordinator-trace",
            lambda: self._tracer.call_of(fn, arguments.specs[0], arguments.specs[1], self._scope),
        ).result()

    def _present_schedule(self) -> Any:
        schedule = self._schedule()
        if schedule is None:
            raise StrategyClosedError("A function on the client schedules, and its strategy does not exist any more.")
        return schedule

    def _schedule_when_free(
        self, call: ClientCall, schedule: Callable[[], Future], may_end: Callable[[], bool]
    ) -> Future | None:
        """Waits for room, and schedules unless the call was cut meanwhile.

        Args:
          call: the call.
          schedule: schedules.
          may_end: returns whether it is to wait for the result, too; it may not any more once workers have the data.
        """
        self._scheduler.wait_for_room(call.cut.done)
        if call.cut.done():
            return None
        future = schedule()
        while may_end() and not (future.done() or call.cut.done()):
            concurrent.futures.wait([future, call.cut], _MOMENT, concurrent.futures.FIRST_COMPLETED)
        if may_end():
            self._wait_for([future], call.cut)
        return future

    def _wait_for(self, futures: Sequence[Future], cut: concurrent.futures.Future[None]) -> None:
        """Waits until all futures are done, or `cut` is. Raises the error that has cancelled one of them."""
        for future in futures:
            concurrent.futures.wait([future, cut], return_when=concurrent.futures.FIRST_COMPLETED)
            if cut.done():
                return
        if not all(map(_has_result, futures)):
            self._scheduler.done()

    def _number_of(self, result_type: Any) -> int:
        if result_type not in self._types:
            self._types.append(result_type)
        return self._types.index(result_type)

    def _call(self) -> Any:
        return call_time_values(self._calls.begin, _CALL, self)

    def _wakeup(self) -> Any:
        """Adds an operation that waits for the end of the wait of this call."""
        return tf.raw_ops.QueueDequeueV2(handle=self._call()[1], component_types=[tf.bool])[0]

    def _python(
        self, work: Callable[..., list[Any]], inputs: Sequence[Any], specs: Sequence[tf.TensorSpec]
    ) -> list[Any]:
        """Adds an operation that calls `work(call, *values of the inputs)` on the client; returns its outputs."""

        def run(number: Any, *values: Any) -> list[Any]:
            call = self._calls[number]
            return call.run(lambda: work(call, *values))

        outputs = python_operation(run, [self._call()[0], *inputs], [spec.dtype for spec in specs])
        for output, spec in zip(outputs, specs, strict=True):
            output.set_shape(spec.shape)
        return outputs


def _packed(spec: Any, values: Iterator[Any]) -> Any:
    """Returns a tensor, or a composite tensor, of the next of `values`."""
    parts = list(itertools.islice(values, len(_components(spec))))
    return tf.nest.pack_sequence_as(spec, parts, expand_composites=True)


def _has_result(future: Future) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
