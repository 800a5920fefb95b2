"""`schedule`, `join`, `done` and `local_results` in a `tf.function` that the program calls on the client.

    @tf.function
    def train(steps):                                     when it is traced          when it runs
        for _ in tf.range(steps):
            future = strategy.schedule(step, (iterator,))   traces `step`              schedules a call
        strategy.join()                                                              waits
        return strategy.local_results(future)               the types of the results   the results

Each of these methods adds an operation that calls Python on the client. The operations, and all other effects, run in
program order; see `barriers_in_order`. The diagram shows how a call waits, raises errors, and ends by Ctrl-C:

    user's thread    train(100) ──► TensorFlow ───────────────────────────────────────► KeyboardInterrupt, or the error
                                        │ runs the graph                        ▲
    TensorFlow's threads          begin_wait ─► dequeue, without a thread ─► end_wait
                                        │           ▲
    coordinator-client-wait             └──► join ──┘ enqueue
    coordinator-client-interrupts   a byte for each signal ──► cut the calls of the main thread

TensorFlow runs graphs on one thread per processor, and needs these threads to connect to a worker that returns. So a
graph must not block a thread. A thread of this library waits instead, and the graph waits for an element of a queue.
"""

import concurrent.futures
import contextlib
import functools
import inspect
import itertools
import os
import re
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.background_thread import BackgroundThread
from coordinator.errors import StrategyClosedError
from coordinator.future import Future
from coordinator.ps_strategy.calls.function_tracer import FunctionTracer
from coordinator.ps_strategy.fusing.repeated_function import spec_of, stackable
from coordinator.ps_strategy.membership.bounded_calls import on_own_thread
from coordinator.ps_strategy.per_worker.resource import PerWorkerResource
from coordinator.ps_strategy.tensorflow_internals.graph_calls import (
    barriers_in_order,
    call_time_values,
    errors_raised_as,
    plain_loops_as,
    python_operation,
)
from coordinator.workers.scheduler import Scheduler

# In bytes. If the address of an array is a multiple of this number, TensorFlow uses the array's memory without a copy.
_ALIGNMENT = 64
# The number of handles. The handle of a deleted future is used again.
_HANDLES = 1 << 31
# In seconds. The interval at which a call that waits checks whether its data may still end.
_MOMENT = 0.05
# A loop that passes only these arguments to `schedule` may be scheduled as one call of many runs.
_LOOP_OPTIONS = frozenset({"args", "kwargs", "worker", "timeout"})
# The number of a call in the text of an error.
_NUMBER = re.compile(r"\[coordinator call (\d+)\]")
# The types of a call's number and of the handle of its queue.
_CALL = (tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.resource))
_HANDLE, _BOOL = tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.bool)


class GraphFuture(tf.experimental.ExtensionType):
    """A future in a graph: the result of a function that a function on the client schedules.

    A graph may pass it to `strategy.schedule` and `strategy.local_results`, use it as a loop variable, and return it.

    Attributes:
      handle: int32 []; identifies the future. The future lives as long as this tensor or an alias of it.
      result_type: the index of the result's type in a list of `ClientFunctions`.
    """

    handle: tf.Tensor
    result_type: int


class _Handle(np.ndarray):
    """The memory of a future's handle, which TensorFlow's tensors share; an int32 scalar."""

    future: Future


class Futures:
    """The futures whose handles are in use. A handle is a value of a graph, a number that identifies a future.

    TensorFlow's tensors share the memory of the array that Python returns for a handle, and keep the array alive. The
    array keeps the future alive, so that the last tensor of a handle releases the future. A handle is an int32, because
    TensorFlow keeps int32 tensors in host memory, even if the graph runs on a GPU.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._handles: weakref.WeakValueDictionary[int, _Handle] = weakref.WeakValueDictionary()

    def add(self, future: Future) -> Any:
        """Returns a handle of a future."""
        memory = np.empty(_ALIGNMENT + 4, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        # TensorFlow's view of the handle would refer to the handle's base if this base were not a `_Handle`, too.
        handle: Any = memory[start : start + 4].view(np.int32).view(_Handle).reshape([])
        numbers = (number % _HANDLES for number in self._numbers)
        number = next(number for number in numbers if number not in self._handles)
        handle[...] = number
        handle.future = future
        self._handles[number] = handle
        return handle

    def __getitem__(self, handle: Any) -> Future:
        array = self._handles.get(int(handle))
        if array is None:
            raise ValueError(
                "A future of a tf.function on the client does not exist any more. It lives as long as the GraphFuture "
                "that schedule returned, and not as a copy of its handle; and no longer than its strategy."
            )
        return array.future

    def __len__(self) -> int:
        return len(self._handles)


class ClientArguments:
    """The arguments of a call in a function on the client: a structure in which some leaves are tensors of its graph.

    when it is traced    (x, iterator, future)     the inputs of an operation: x, the handle of the future
    when it runs         (3.0, iterator, future)   the structure with their values

    Attributes:
      inputs: the tensors.
      specs: the structure, with `tf.TypeSpec`s in place of the leaves that have tensors.
    """

    def __init__(self, structure: Any, futures: Futures, types: Sequence[Any]) -> None:
        self.inputs: list[Any] = []
        self._futures = futures
        self._types = types
        # For each leaf: a function that makes the leaf when the graph runs, and the number of the function's arguments.
        self._leaves: list[tuple[Callable[..., Any], int]] = []
        self.specs = tf.nest.map_structure(self._add, structure)
        self._structure = tf.nest.map_structure(lambda _: 0, structure)

    def _add(self, leaf: Any) -> Any:
        """Adds a leaf; returns its `tf.TypeSpec`, or the leaf itself if it has no symbolic tensor."""
        if isinstance(leaf, GraphFuture):
            self.inputs.append(leaf.handle)
            self._leaves.append((self._futures.__getitem__, 1))
            return self._types[leaf.result_type]
        # With `coordinator.compat`, TensorFlow treats per-worker iterators as composite tensors.
        is_per_worker = isinstance(leaf, PerWorkerResource)
        tensors = [] if is_per_worker else tf.nest.flatten(leaf, expand_composites=True)
        if not any(tf.is_symbolic_tensor(tensor) for tensor in tensors):
            self._leaves.append((lambda: leaf, 0))
            return leaf
        if any(tensor.dtype in (tf.resource, tf.variant) for tensor in tensors):
            raise TypeError(
                f"{leaf!r} cannot be passed to schedule in a tf.function on the client. Refer to the variable, "
                "iterator or dataset that was made outside of it, in place of an argument of the tf.function."
            )
        self.inputs.extend(tensors)
        spec = tf.type_spec_from_value(leaf)
        self._leaves.append((functools.partial(_with_values, spec), len(tensors)))
        return spec

    def with_values(self, values: Sequence[Any]) -> Any:
        """Returns the structure with `values` in place of the tensors `inputs`."""
        remaining = iter(values)
        leaves = [make(*itertools.islice(remaining, count)) for make, count in self._leaves]
        return tf.nest.pack_sequence_as(self._structure, leaves)


def _with_values(spec: tf.TypeSpec, *values: Any) -> Any:
    if isinstance(spec, tf.TensorSpec) and spec.dtype != tf.string:
        return np.asarray(values[0])
    components = tf.nest.flatten(spec, expand_composites=True)
    tensors = [tf.constant(value, component.dtype) for value, component in zip(values, components, strict=True)]
    return tf.nest.pack_sequence_as(spec, tensors, expand_composites=True)


class CallError(Exception):
    """Ends the run of a graph. The text contains the number of a `ClientCall`, whose error is raised instead."""


class ClientCall:
    """One call of a function on the client that schedules.

    Attributes:
      is_of_main_thread: whether the main thread made the call. Ctrl-C ends only calls of the main thread.
      cut: is done once the call must end.
      error: the error with which the call ends, or None.
      wakeups: the queue that gets an element when a wait has ended.
    """

    def __init__(self, number: int, device: str) -> None:
        self.number = number
        self.is_of_main_thread = threading.current_thread() is threading.main_thread()
        self.cut = concurrent.futures.Future[None]()
        self.error: BaseException | None = None
        with tf.device(None), tf.device(device):
            self.wakeups = tf.queue.FIFOQueue(1, [tf.bool], [[]])
        self._outcome: concurrent.futures.Future[Any] | None = None

    def run(self, work: Callable[[], Any]) -> Any:
        """Calls `work`. The first error, or KeyboardInterrupt after a cut, becomes the error of this `ClientCall`."""
        try:
            if self.cut.done():
                raise KeyboardInterrupt
            return work()
        except BaseException as error:  # noqa: BLE001 - raised by the call
            self.error = self.error or error
            raise CallError(f"{type(self.error).__name__}: {self.error} [coordinator call {self.number}]") from None

    def begin_wait(self, work: Callable[[], Any]) -> None:
        """Calls `work`, which may wait, on another thread. `work` must return once `cut` is done."""
        self._outcome = on_own_thread("coordinator-client-wait", work)
        # `enqueue` does not wait, because the queue is empty.
        self._outcome.add_done_callback(lambda _: self.wakeups.enqueue(True))

    def end_wait(self) -> Any:
        """Returns the result of the wait that was begun, or raises its error; None if there was no wait."""
        outcome, self._outcome = self._outcome, None
        return None if outcome is None else outcome.result()


class ClientCalls:
    """The calls in progress. Ctrl-C ends the calls of the main thread.

    Python calls a signal handler on the main thread, after TensorFlow has returned. But Python writes a byte for each
    signal immediately, and a thread of this class reads the byte while the main thread is in TensorFlow. The SIGINT
    handler is replaced only if it is Python's own, which raises `KeyboardInterrupt`, because the purpose of any other
    handler is unknown. `wake` wakes all waits of calls; each wait then checks whether its call must end.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        with tf.init_scope(), tf.device(None), tf.device("/device:CPU:0"):
            self.device = tf.constant(0).device
        self._wake = wake
        self._numbers = itertools.count()
        self._calls: dict[int, ClientCall] = {}
        self._received, self._sent = socket.socketpair()
        self._sent.setblocking(False)
        # The wakeup descriptor that the program had set; -1 for none.
        self._former = -1
        self._thread = BackgroundThread("coordinator-client-interrupts", self._read_signals)
        self._thread.start()

    def __getitem__(self, number: Any) -> ClientCall:
        return self._calls[int(number)]

    def begin(self) -> tuple[Any, Any]:
        """Begins a call by the calling thread; returns tensors with the number and the queue of the call.

        The call ends when `error_in` returns its error, or when the number's tensor is no longer referenced.
        """
        call = ClientCall(next(self._numbers), self.device)
        with tf.device(None), tf.device(self.device):
            number = tf.constant(np.int64(call.number))
        self._calls[call.number] = call
        weakref.finalize(number, self._end, call.number).atexit = False
        if call.is_of_main_thread:
            self._watch_signals()
        return number, call.wakeups.queue_ref

    def error_in(self, message: str) -> BaseException | None:
        """Ends the call whose number is in a message of TensorFlow, and returns its error."""
        match = _NUMBER.search(message)
        call = self._end(int(match[1])) if match else None
        return None if call is None else call.error

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        try:
            with errors_raised_as(self.error_in):
                yield
        finally:
            self._restore_signals()
            self._thread.stop()
            self._sent.shutdown(socket.SHUT_WR)
            self._thread.wait_stopped()
            self._received.close()
            self._sent.close()

    def _end(self, number: int) -> ClientCall | None:
        call = self._calls.pop(number, None)
        if call is not None and call.is_of_main_thread and not self._of_main_thread():
            # Only the main thread may set signal handlers. If a call ends on another thread, the end of the next call
            # restores the handlers.
            self._restore_signals()
        return call

    def _of_main_thread(self) -> list[ClientCall]:
        return [call for call in list(self._calls.values()) if call.is_of_main_thread]

    def _watch_signals(self) -> None:
        former = signal.set_wakeup_fd(self._sent.fileno(), warn_on_full_buffer=False)
        if former != self._sent.fileno():
            self._former = former
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)

    def _restore_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        present = signal.set_wakeup_fd(self._former, warn_on_full_buffer=False)
        if present != self._sent.fileno():
            # Other code has set a descriptor during the calls, which stays.
            signal.set_wakeup_fd(present)
        if signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, number: int, frame: Any) -> None:
        # TensorFlow fails if a handler raises while TensorFlow converts a graph's error. So that error is replaced.
        ending = [call for call in self._of_main_thread() if call.error is not None]
        for call in ending:
            call.error = KeyboardInterrupt()
        if not ending:
            signal.default_int_handler(number, frame)

    def _read_signals(self) -> None:
        while numbers := self._received.recv(64):
            if self._former != -1:
                with contextlib.suppress(OSError):
                    os.write(self._former, numbers)
            if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) == self._handle:
                for call in self._of_main_thread():
                    if not call.cut.done():
                        call.cut.set_result(None)
                self._wake()


class ClientFunctions:
    """The methods that functions on the client call. Refers weakly to `schedule`, the strategy's method.

    Attributes:
      futures: the futures whose handles are in use.
      device: the client's device. All added operations run there.
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
        self._waits = scheduler.queue
        self._calls = ClientCalls(self._waits.wake_waits)
        self.device = self._calls.device
        self.futures = Futures()
        self._types: list[Any] = []

    @contextlib.contextmanager
    def open(self) -> "Iterator[ClientFunctions]":
        with barriers_in_order(self), plain_loops_as(self._schedule_loop), self._calls.open():
            yield self

    def result_or_none(self, value: Any) -> Any:
        """Waits for the result of a future or `GraphFuture`; None if it failed. Returns other values unchanged."""
        future = self.futures[value.handle] if isinstance(value, GraphFuture) else value
        return future.result_or_none() if isinstance(future, Future) else value

    def schedule(
        self, fn: Any, args: Any = None, kwargs: Any = None, *, steps: Any = None, is_used: bool = True, **options: Any
    ) -> GraphFuture:
        """Adds an operation that calls `ParameterServerStrategy.schedule`; `fn` is traced now.

        The arguments are the same, but `steps` may be a tensor. If `is_used` is False, the results of many runs are
        dropped. If the data may end, the operation still waits for the results, because a loop that schedules until the
        data has ended must raise the error of that end.
        """
        arguments = self._arguments(args, kwargs, {"steps": steps, **options})
        traced = self._traced(fn, arguments)
        inputs, result_type = traced.inputs, traced.function.result_spec

        def schedule(values: Sequence[Any]) -> Any:
            method: Any = self._schedule()
            if method is None:
                raise StrategyClosedError(
                    "A function on the client schedules, and its strategy does not exist any more."
                )
            args, kwargs, options = arguments.with_values(values)
            options = {name: getattr(value, "item", lambda value=value: value)() for name, value in options.items()}
            future = method(fn, args, kwargs, **options)
            if not is_used:
                future.discard()
            return future

        def may_end() -> bool:
            return not is_used and any(data.is_finite is not False for data in inputs)

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
        if steps is not None:
            first = tf.TensorShape([None if tf.is_tensor(steps) else steps])
            result_type = tf.nest.map_structure(
                lambda spec: spec and tf.TensorSpec(first.concatenate(spec.shape), spec.dtype), result_type
            )
        if result_type not in self._types:
            self._types.append(result_type)
        return GraphFuture(handle, self._types.index(result_type))

    def _schedule_loop(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], count: Any) -> bool:
        """Adds an operation that schedules `count` runs, in place of a loop that schedules one run per iteration.

        The loop calls only `function(*args, **kwargs)`. Returns False if `function` is not `schedule`, or if `count`
        runs would behave differently than the loop.
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

        def begin(call: ClientCall) -> None:
            call.begin_wait(lambda: self._waits.wait_settled(timeout, call.cut.done))

        self._python(begin, [], [])
        self._wakeup()
        self._python(ClientCall.end_wait, [], [])

    def done(self) -> Any:
        """Adds an operation that calls `ParameterServerStrategy.done`; returns its result, a bool scalar."""
        return self._python(lambda call: [self._scheduler.done()], [], [_BOOL])[0]

    def local_results(self, structure: Any) -> Any:
        """Adds operations that wait for futures; returns the structure with their results as tensors."""
        leaves = [leaf for leaf in tf.nest.flatten(structure) if isinstance(leaf, GraphFuture | Future)]
        if not leaves:
            return structure
        futures = ClientArguments(leaves, self.futures, self._types)
        types = [spec_of(spec) if isinstance(spec, Future) else spec for spec in futures.specs]

        def begin(call: ClientCall, *handles: Any) -> list[Any]:
            awaited = futures.with_values(handles)
            is_waiting = not all(map(_has_result, awaited))
            if is_waiting:
                call.begin_wait(lambda: self._wait_for(awaited, call))
            return [is_waiting]

        def end(call: ClientCall, *handles: Any) -> list[Any]:
            call.end_wait()
            parts = [part for future in futures.with_values(handles) for part in _components(future.result())]
            return [part.numpy() if tf.is_tensor(part) else part for part in parts]

        tf.cond(self._python(begin, futures.inputs, [_BOOL])[0], self._wakeup, lambda: False)
        values = iter(self._python(end, futures.inputs, _components(types)))
        results = iter([tf.nest.map_structure(lambda spec: spec and _packed(spec, values), each) for each in types])
        return tf.nest.map_structure(
            lambda leaf: next(results) if isinstance(leaf, GraphFuture | Future) else leaf, structure
        )

    def _arguments(self, args: Any, kwargs: Any, options: Any) -> ClientArguments:
        structure = (() if args is None else args, {} if kwargs is None else kwargs, options)
        return ClientArguments(structure, self.futures, self._types)

    def _traced(self, fn: Any, arguments: ClientArguments) -> Any:
        """Traces a function on a new thread, because gradients can only be traced on a thread without a graph."""
        args, kwargs, _ = arguments.specs
        trace = functools.partial(self._tracer.call_of, fn, args, kwargs, self._scope)
        return on_own_thread("coordinator-trace", trace).result()

    def _schedule_when_free(
        self, call: ClientCall, schedule: Callable[[], Future], may_end: Callable[[], bool]
    ) -> Future | None:
        """Waits for room in the queue, schedules unless the call was cut, and awaits the result while `may_end()`."""
        self._scheduler.wait_for_room(call.cut.done)
        if call.cut.done():
            return None
        future = schedule()
        while may_end() and not (future.done() or call.cut.done()):
            concurrent.futures.wait([future, call.cut], _MOMENT, concurrent.futures.FIRST_COMPLETED)
        if may_end():
            self._wait_for([future], call)
        return future

    def _wait_for(self, futures: Sequence[Future], call: ClientCall) -> None:
        """Waits until all futures are done or the call is cut. Raises the error that has cancelled a future."""
        for future in futures:
            concurrent.futures.wait([future, call.cut], return_when=concurrent.futures.FIRST_COMPLETED)
            if call.cut.done():
                return
        if not all(map(_has_result, futures)):
            self._scheduler.done()

    def _call(self) -> Any:
        return call_time_values(self._calls.begin, _CALL, self)

    def _wakeup(self) -> Any:
        """Adds an operation that completes when the present call has stopped waiting."""
        return tf.raw_ops.QueueDequeueV2(handle=self._call()[1], component_types=[tf.bool])[0]

    def _python(self, work: Callable[..., Any], inputs: Sequence[Any], specs: Sequence[tf.TensorSpec]) -> list[Any]:
        """Adds an operation that calls `work(call, *values of the inputs)` on the client; returns its outputs."""

        def run(number: Any, *values: Any) -> Any:
            call = self._calls[number]
            outputs = call.run(lambda: work(call, *values))
            return outputs if specs else []

        outputs = python_operation(run, [self._call()[0], *inputs], [spec.dtype for spec in specs])
        for output, spec in zip(outputs, specs, strict=True):
            output.set_shape(spec.shape)
        return outputs


def _components(result: Any) -> list[Any]:
    return [part for part in tf.nest.flatten(result, expand_composites=True) if part is not None]


def _packed(spec: Any, values: Iterator[Any]) -> Any:
    parts = list(itertools.islice(values, len(_components(spec))))
    return tf.nest.pack_sequence_as(spec, parts, expand_composites=True)


def _has_result(future: Future) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
