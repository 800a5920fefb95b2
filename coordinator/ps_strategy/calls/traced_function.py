"""A traced function that can run on any worker, and one scheduled call of the function.

When a worker first runs a function, the worker prepares an instance of the function for the present servers, and keeps
the instance by the function's name. When a parameter server is replaced, TensorFlow makes workers drop all their
instances. But a preparation cannot be cancelled:

    call --> worker prepares the function .............................. keeps the instance --> next calls fail
      |                     |                                |
      |       parameter server lost, call cancelled    instances are dropped
      '--> fails on the client                         (server replaced)

An instance that was being prepared at the replacement is for the former server, and every call of the instance fails
("RecvTensor expects a different device incarnation"). So a function with a failed call gets a new name after recovery.

The result of a call may stay on the worker that computed it until it is needed: `schedule(..., fetch=False)`.

    tensors on a worker --taken by a function on that worker--> passed without a copy
                        --result(), or taken elsewhere--------> copied to the client, once
                        --lost with the worker----------------> computed again from the arguments of the call

Guarantee: the result is available as long as its function can be run; `future.attempts` counts the attempts.

A fused call, and a copy with packed messages, are built in the background and prepared on each worker before a closure
needs them there:

    want --> build (builder's thread) --> built --> prepare (an internal closure of each worker) --> ready there
      ^                                     |                                                          |
      |                                     '-- cannot be built: never ready                           |
      '------------- the worker was reconnected, or parameter servers were recovered ------------------'
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from coordinator.data.ranges import LateRange
from coordinator.errors import ClosureCancelledError, StrategyClosedError
from coordinator.future import Future, ValueElsewhere
from coordinator.ps_strategy.fusing.graph_copies import calls_before_packing, packed_function
from coordinator.ps_strategy.fusing.repeated_function import (
    RepeatedFunction,
    StackedInputs,
    is_on_client,
    may_be_fused,
    own_memory,
    stacked,
)
from coordinator.ps_strategy.membership.bounded_calls import on_own_thread
from coordinator.ps_strategy.per_worker.dataset import PerWorkerIterator, elements_per_call, iterators_in_use
from coordinator.ps_strategy.per_worker.resource import PerWorkerHandles, PerWorkerResource, WorkerContext
from coordinator.ps_strategy.tensorflow_internals.functions import (
    call_concrete,
    captured_inputs,
    captures_of,
    flat_inputs,
    forget_error,
    own_executor,
    structure_outputs,
    under_another_name,
)
from coordinator.ps_strategy.tensorflow_internals.handles import is_on_parameter_server, owner_of_handle, present_handle
from coordinator.runtime import Builds, FiniteInput, FusionKey, Preparation
from coordinator.workers.scheduler import Scheduler

_logger = logging.getLogger("coordinator")

# Raised by a call if a worker, or a connection between two servers, is lost.
BROKEN_CONNECTION = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)


class PreparedFunction:
    """One function with a gate, see `gated_function`. Any thread may call every method.

    `build` returns an object with the `concrete` function, or None if there is nothing to build.

    Attributes:
      built: the result of `build`; None before `build` has returned.
      seconds: the time to build the function and to prepare it on the first worker.
    """

    def __init__(self, name: str, build: Callable[[], Any]) -> None:
        self.built: Any = None
        self.seconds = 0.0
        self._name = name
        self._build = build
        # Guards the fields below. No other lock is taken while it is held.
        self._lock = threading.Lock()
        # Whether `build` has ended.
        self._is_over = False
        # The workers for which the function is being built or prepared.
        self._wanted: set[int] = set()
        # By worker: the number of the connection and the captures at the time of the preparation. A recovery of
        # parameter servers replaces the captures.
        self._ready: dict[int, tuple[int, Any]] = {}
        self._inputs: dict[int, Sequence[Any]] = {}

    def is_ready_on(self, worker: int, connection: int, captures: Any) -> bool:
        known = self._ready.get(worker)
        return known is not None and known[0] == connection and known[1] is captures

    def is_wanted_on(self, worker: int) -> bool:
        """Returns whether the function is being built or prepared for a worker, or can never be built."""
        return worker in self._wanted or (self._is_over and self.built is None)

    def want(self, worker: int, builds: Builds, inputs: Sequence[Any], prepare: Callable[[WorkerContext], Any]) -> None:
        """Has the function built and prepared on a worker, unless the build or preparation is in progress.

        Args:
          worker: the index of the worker.
          builds: runs the build and the preparation.
          inputs: tensors with the types and devices of later calls, without captures; types for client values.
          prepare: calls `prepare_on` on the worker; must not keep this object alive.
        """
        with self._lock:
            if self.is_wanted_on(worker):
                return
            self._wanted.add(worker)
            # The values of client tensors are not kept. Tensors on a worker, such as iterators, are referred to weakly.
            self._inputs[worker] = [*map(_reference, inputs)]
            is_built = self._is_over
        reference = weakref.ref(self)
        end = functools.partial(_end, reference, worker)
        preparation = Preparation(worker, prepare, f"prepare {self._name}", end)
        if is_built:
            builds.prepare(preparation)
        else:
            builds.request(functools.partial(_build, reference, builds, preparation))

    def build_now(self) -> bool:
        """Calls `build`, on the builder's thread, if it was not called yet; returns whether the function is built."""
        if not self._is_over:
            began = time.monotonic()
            try:
                with own_executor():
                    self.built = self._build()
            except Exception:
                _logger.warning("%s could not be built; the function runs as before.", self._name, exc_info=True)
            self.seconds += time.monotonic() - began
            self._is_over = True
        return self.built is not None

    def prepare_on(self, context: WorkerContext, captures: Any, passed: Sequence[Any]) -> None:
        """Prepares the function on a worker; `passed` replaces `captures`. Raises OpError if the worker is lost."""
        began = time.monotonic()
        try:
            inputs = [*map(_present, self._inputs.pop(context.index))]
            if any(value is None for value in inputs):
                return
            with tf.device(context.calling_device):
                call_concrete(self.built.concrete, [*inputs, *passed, context.go(False)], context.cancellation)
        except BROKEN_CONNECTION:
            raise
        except tf.errors.OpError as error:
            # The closed gate raised `error`, or an operation without effects refused values. The function is prepared.
            forget_error()
            _logger.debug("%s is prepared on worker %d.", self._name, context.index, exc_info=error)
            self._ready[context.index] = context.connection_number, captures
            if not self._ready.keys() - {context.index}:
                self.seconds += time.monotonic() - began

    def end_on(self, worker: int) -> None:
        with self._lock:
            self._wanted.discard(worker)


# Queued requests to build or prepare refer weakly to the function.


def _build(reference: "weakref.ref[PreparedFunction]", builds: Builds, preparation: Preparation) -> None:
    function = reference()
    if function is not None and function.build_now():
        builds.prepare(preparation)


def _end(reference: "weakref.ref[PreparedFunction]", worker: int) -> None:
    if (function := reference()) is not None:
        function.end_on(worker)


def _reference(tensor: Any) -> Any:
    """Returns the type of an input, or a weak reference to a value that is not on the client."""
    if isinstance(tensor, tf.TensorSpec):
        return tensor
    if tensor.dtype in (tf.resource, tf.variant) or not is_on_client(tensor.device):
        return weakref.ref(tensor)
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _present(reference: Any) -> Any:
    """Returns zeros for a type; for a weak reference the tensor, or None if the tensor was deleted."""
    if isinstance(reference, tf.TensorSpec):
        with tf.device(None), tf.device("/device:CPU:0"):
            return tf.zeros(reference.shape, reference.dtype)
    return reference()


# In seconds. A worker that needs a fused call which another worker builds waits this long, then builds its own.
_BUILD_TIMEOUT = 120.0
# The number of steps in a fused call, and for each input whether the steps share it.
_FusedShape = tuple[int, tuple[bool, ...]]
# None in place of a `_FusedShape` means one step with packed messages.
_PACKED = None


class RenamedFunctions:
    """The functions that were renamed, and the functions to call in their place."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By function: the captures with which a call failed. After a recovery, the captures are another object.
        self._failed: dict[Any, Any] = {}
        self._renamed: dict[Any, concurrent.futures.Future[Any]] = {}

    def record_failure(self, concrete: Any, captures: Any) -> None:
        """Records a failed call with these `captures`: a worker may still be preparing the function."""
        with self._lock:
            self._failed[concrete] = captures

    def present(self, concrete: Any, captures: Any) -> Any:
        """Returns the function to call: `concrete`, or for all workers the same copy of it under another name."""
        with self._lock:
            failed = self._failed.get(concrete)
            must_rename = failed is not None and failed is not captures
            if must_rename:
                del self._failed[concrete]
                self._renamed[concrete] = concurrent.futures.Future()
            renamed = self._renamed.get(concrete)
        if renamed is None:
            return concrete
        if must_rename:
            try:
                renamed.set_result(under_another_name(concrete))
            except BaseException as error:  # noqa: BLE001 - raised by all that wait for the result
                self.record_failure(concrete, failed)
                renamed.set_exception(error)
        return renamed.result()


class Repeats:
    """Repeats a call whose result was lost. Refers weakly to the scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = weakref.ref(scheduler)
        self._future: Callable[[], Future | None] = lambda: None

    def follow(self, future: Future) -> None:
        """Sets the future that counts the attempts."""
        self._future = weakref.ref(future)

    def count(self) -> None:
        if (future := self._future()) is not None:
            future.attempts += 1

    def schedule(self, call: "ScheduledCall") -> Future:
        """Schedules a call; raises StrategyClosedError if the strategy is closed."""
        scheduler = self._scheduler()
        if scheduler is None:
            raise StrategyClosedError("A result was lost with its worker, and the strategy does not exist any more.")
        return scheduler.schedule(call, call.function.name, origin=call.function, inputs=call.inputs)


class LeftResult(ValueElsewhere):
    """The result of a call, on the worker that computed it or, once copied, on the client."""

    def __init__(self, call: "ScheduledCall", repeats: Repeats, context: WorkerContext, outputs: Any) -> None:
        self._call = call
        self._repeats = repeats
        # The place (a worker and its connection, or None for the client) and the values; replaced as a whole. If
        # several threads need the values at the same time, each of them copies the values, or computes them again.
        self._held: tuple[tuple[int, int] | None, Any] = _place(context), outputs

    def fetch(self, timeout: float | None = None) -> Any:
        """Returns the value on the client; computes it again if it was lost. See `Future.result`."""
        place, value = self._held
        if place is None:
            return value
        try:
            value = copy_to_client(value, timeout)
        except tf.errors.OpError:
            self._repeats.count()
            value = self._repeats.schedule(self._call.fetching()).result(timeout)
        self._held = None, value
        return value

    def value_on(self, context: WorkerContext) -> Any:
        """Returns the value for a function on a worker, whose thread calls this."""
        place, value = self._held
        if place is None or place == _place(context):
            return value
        try:
            place, value = None, copy_to_client(value)
        except tf.errors.OpError:
            self._repeats.count()
            place, value = _place(context), self._call.outputs_on(context)
        self._held = place, value
        return value


def on_client(value: Any) -> Any:
    """Returns the NumPy value of a tensor, or a copy on the client of a composite tensor, such as a ragged one."""
    if isinstance(value, tf.Tensor):
        return value.numpy()
    return tf.nest.map_structure(
        lambda part: tf.constant(part.numpy()) if isinstance(part, tf.Tensor) else part, value, expand_composites=True
    )


def _place(context: WorkerContext) -> tuple[int, int]:
    return context.index, context.connection_number


def copy_to_client(value: Any, timeout: float | None = None) -> Any:
    """Copies tensors of a worker to the client; raises OpError if the tensors are lost."""
    # A thread with its own executor makes the copy, because the executor of this thread would keep an error.
    return on_own_thread("coordinator-fetch", lambda: tf.nest.map_structure(on_client, value)).result(timeout)


class TracedFunction:
    """A concrete function that can run on any worker. Captured per-worker resources are bound at each call.

    `token` identifies the function without keeping it alive. Raises ValueError for a function that uses a variable of
    unknown shape, see `refuse_unknown_shapes`.
    """

    def __init__(self, concrete: Any, handles: PerWorkerHandles) -> None:
        self.token = object()
        self.concrete = concrete
        self.handles = handles
        # The captures (another list after a recovery of parameter servers), and the values to pass for them.
        self._bound = self._bind()
        # Fused calls that are built when a call needs them, one for all workers.
        self._fused: dict[_FusedShape, concurrent.futures.Future[RepeatedFunction]] = {}
        # Fused calls that are built in the background.
        self._prepared: dict[_FusedShape, PreparedFunction] = {}
        self._renamed = RenamedFunctions()
        self._calls = 0
        # A table of a SavedModel creates the workers' copies, so the function keeps the table alive without its model.
        self._owners = [owner_of_handle(tensor) for tensor in captured_inputs(concrete)]
        refuse_unknown_shapes(self.name, self._owners)

    @functools.cached_property
    def name(self) -> str:
        return str(self.concrete.graph.name)

    @property
    def result_spec(self) -> Any:
        """The `tf.TypeSpec`s of the result. Functions that take the result are traced with these types."""

        def spec(value: Any) -> Any:
            return value if value is None or isinstance(value, tf.TypeSpec) else tf.type_spec_from_value(value)

        return tf.nest.map_structure(spec, self.concrete.structured_outputs)

    @property
    def uses_client_dataset(self) -> bool:
        """Whether the function uses a dataset that was created outside of the function, on the client."""
        return any(tensor.dtype == tf.variant for tensor in captured_inputs(self.concrete))

    def call_on(self, context: WorkerContext, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Runs the function on a worker; its results stay there.

        Raises ClosureInputError, ClosureCancelledError, or an OpError of the call.
        """
        return self._call_alone(context, self.inputs_on(context, args, kwargs or {}))

    def _call_alone(self, context: WorkerContext, inputs: Sequence[Any]) -> Any:
        """Runs the function's copy with packed messages if it is prepared on the worker, otherwise the function."""
        captures, passed = self._captures_on(context)
        packed = self._packed
        if packed.is_ready_on(context.index, context.connection_number, captures):
            packed_inputs = [*inputs, *passed, context.go(True)]
            return self._run(context, captures, packed.built.concrete, packed_inputs, stands_for=self.concrete)
        # Several threads count without a lock; a few calls more or less do not matter.
        self._calls += 1
        if self._calls >= self._calls_before_packing:
            packed.want(context.index, context.builds, inputs, self._preparing(_PACKED))
        return self._run(context, captures, self.concrete, [*inputs, *passed])

    def inputs_on(self, context: WorkerContext, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Returns the input tensors on a worker for these arguments, without captures.

        Raises ClosureInputError if a per-worker resource cannot be created, TypeError for unsuitable arguments.
        """
        args, kwargs = tf.nest.map_structure(lambda leaf: _own_copy(leaf, context), (tuple(args), dict(kwargs)))
        inputs = flat_inputs(self.concrete, args, kwargs)
        if not self._takes_handles:
            return inputs
        resource_for = self.handles.resource_for
        return [
            tensor if (resource := resource_for(tensor)) is None else resource.value_on(context) for tensor in inputs
        ]

    @functools.cached_property
    def _takes_handles(self) -> bool:
        """Whether an argument is the handle of a variable or another resource that workers may have copies of."""
        inputs = self.concrete.inputs[: len(self.concrete.inputs) - len(captures_of(self.concrete))]
        leaves = tf.nest.flatten(self.concrete.structured_input_signature)
        iterators = sum(isinstance(leaf, tf.data.IteratorSpec) for leaf in leaves)
        return sum(tensor.dtype == tf.resource for tensor in inputs) != iterators

    @functools.cached_property
    def may_be_fused(self) -> bool:
        """Whether the function's graph may be copied, so that several calls can run as one."""
        is_transferable = all(tensor.dtype not in (tf.resource, tf.variant) for tensor in self.concrete.outputs)
        return is_transferable and may_be_fused(self.concrete)

    @functools.cached_property
    def elements_per_call(self) -> float:
        """The most elements that a call takes from each iterator among its arguments; infinite if unknown."""
        return elements_per_call(self.concrete)

    @functools.cached_property
    def _calls_before_packing(self) -> float:
        return calls_before_packing(self.concrete) if self.may_be_fused else math.inf

    @functools.cached_property
    def _packed(self) -> PreparedFunction:
        return PreparedFunction(f"the packed messages of {self.name}", functools.partial(_packed, self.concrete))

    def ready_sizes(self, worker: int, connection: int) -> dict[int, float]:
        """Returns the numbers of steps of the fused calls that are prepared on a worker, with the build times in s."""
        captures = captures_of(self.concrete)
        return {
            count: prepared.seconds
            for (count, _), prepared in list(self._prepared.items())
            if prepared.is_ready_on(worker, connection, captures)
        }

    def is_preparing(self, worker: int, count: int) -> bool:
        """Returns whether a call of `count` steps is being built or prepared on a worker."""
        return any(known == count and each.is_wanted_on(worker) for (known, _), each in list(self._prepared.items()))

    def prepare_fused(self, context: WorkerContext, inputs: StackedInputs) -> None:
        """Has a call of several steps with inputs like these built in the background, and prepared on a worker."""
        shape = inputs.length, inputs.is_shared
        prepared = self._prepared.get(shape)
        if prepared is None:
            build = functools.partial(RepeatedFunction, self.concrete, *shape)
            prepared = self._prepared.setdefault(shape, PreparedFunction(f"{self.name} ({inputs.length} steps)", build))
        prepared.want(context.index, context.builds, inputs.values, self._preparing(shape))

    def _preparing(self, shape: _FusedShape | None) -> Callable[[WorkerContext], None]:
        """Returns the work that prepares a call on a worker. It does not keep this function alive."""
        return functools.partial(_prepare, weakref.ref(self), shape)

    def prepare_on(self, context: WorkerContext, shape: _FusedShape | None) -> None:
        """Prepares a call of several steps on a worker; None for one step with packed messages."""
        prepared = self._packed if shape is None else self._prepared[shape]
        prepared.prepare_on(context, *self._captures_on(context))

    def call_fused(self, context: WorkerContext, inputs: StackedInputs) -> list[Any]:
        """Runs the steps of a fused call on a worker, in order. Raises what `call_on` raises.

        Returns the result of each step, on the client: NumPy values, or composite tensors.
        """
        columns = self._call_fused(context, inputs)
        results = zip(*columns, strict=True) if columns else [()] * inputs.length
        return [structure_outputs(self.concrete, [*map(own_memory, result)]) for result in results]

    def call_stacked(self, context: WorkerContext, inputs: StackedInputs) -> Any:
        """Runs a fused call like `call_fused`; returns one result. Its outputs have the steps along the first axis."""
        return structure_outputs(self.concrete, [*map(stacked, self._call_fused(context, inputs))])

    def _call_fused(self, context: WorkerContext, inputs: StackedInputs) -> list[Sequence[Any]]:
        if not self._prepared:
            repeated = self._fused_function(inputs.length, inputs.is_shared)
        elif (ready := self._ready_for(context, inputs)) is not None:
            repeated, inputs = ready
        else:
            # The prepared calls share other inputs. The steps run one by one, since closures must not await a build.
            self.prepare_fused(context, inputs)
            return self._call_one_by_one(context, inputs)
        captures, passed = self._captures_on(context)
        run = functools.partial(self._run, context, captures)
        return repeated.call_on(inputs.values, passed, context.go(True), run)

    def _ready_for(
        self, context: WorkerContext, inputs: StackedInputs
    ) -> tuple[RepeatedFunction, StackedInputs] | None:
        """Returns a function that is ready on a worker for `inputs`, and `inputs` in the function's form."""
        captures = captures_of(self.concrete)
        for (count, is_shared), prepared in list(self._prepared.items()):
            if count != inputs.length or not prepared.is_ready_on(context.index, context.connection_number, captures):
                continue
            if (stacked_inputs := inputs.stacked_as(is_shared)) is not None:
                return prepared.built, stacked_inputs
        return None

    def _call_one_by_one(self, context: WorkerContext, inputs: StackedInputs) -> list[Sequence[Any]]:
        results = []
        for step in range(inputs.length):
            outputs = self._call_alone(context, inputs.of_step(step))
            results.append([value.numpy() for value in tf.nest.flatten(outputs, expand_composites=True)])
        return [*zip(*results, strict=True)]

    def _fused_function(self, count: int, is_shared: tuple[bool, ...]) -> RepeatedFunction:
        """Returns one fused call for all workers, which need it at about the same time. A build takes seconds."""
        shape = count, is_shared
        built = self._fused.get(shape)
        if built is None:
            own = concurrent.futures.Future[RepeatedFunction]()
            built = self._fused.setdefault(shape, own)
            if built is own:
                self._build_fused(shape, own)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            return built.result(_BUILD_TIMEOUT)
        return RepeatedFunction(self.concrete, *shape)

    def _build_fused(self, shape: _FusedShape, built: concurrent.futures.Future[RepeatedFunction]) -> None:
        try:
            built.set_result(RepeatedFunction(self.concrete, *shape))
        except BaseException as error:  # noqa: BLE001 - raised by all that wait for the result
            # Later calls try to build again.
            del self._fused[shape]
            built.set_exception(error)

    def _captures_on(self, context: WorkerContext) -> tuple[list[Any], list[Any]]:
        """Returns the captures, and the values to pass for them: a worker's copies and variables' present handles."""
        captures, passed, has_copies = self._bound
        if captures is not captures_of(self.concrete):
            self._bound = captures, passed, has_copies = self._bind()
        return captures, [_own_copy(value, context) for value in passed] if has_copies else passed

    def _run(
        self, context: WorkerContext, captures: Any, concrete: Any, inputs: Sequence[Any], stands_for: Any = None
    ) -> Any:
        called = self._renamed.present(concrete, captures)
        try:
            with tf.device(context.calling_device):
                return call_concrete(called, inputs, context.cancellation, stands_for=stands_for or concrete)
        except tf.errors.OpError as error:
            self._renamed.record_failure(concrete, captures)
            # A cancelled call may raise any error: TensorFlow often reports the error of a nested call.
            if context.cancellation.is_cancelled:
                raise ClosureCancelledError("The call was cancelled.") from error
            raise

    def _bind(self) -> tuple[list[Any], list[Any], bool]:
        captures = captures_of(self.concrete)
        # If a variable was restored during the trace, the captured handle is outdated.
        present = map(present_handle, captured_inputs(self.concrete, self.handles.worker_index))
        passed = [self.handles.resource_for(tensor) or tensor for tensor in present]
        return captures, passed, any(isinstance(value, PerWorkerResource) for value in passed)


def _prepare(reference: "weakref.ref[TracedFunction]", shape: _FusedShape | None, context: WorkerContext) -> None:
    if (function := reference()) is not None:
        function.prepare_on(context, shape)


def _packed(concrete: Any) -> Any:
    built = packed_function(concrete)
    return None if built is None else SimpleNamespace(concrete=built)


def refuse_unknown_shapes(name: str, used: Sequence[Any]) -> None:
    """Raises ValueError if one of the variables in `used` is on a parameter server and has unknown dimensions.

    If a worker gets such a variable's handle from another server, the worker's process ends without an error, because
    TensorFlow's code takes only known shapes there. If the rank is unknown, the worker computes as with a scalar.
    """
    for variable in used:
        if not isinstance(variable, tf.Variable) or not is_on_parameter_server(variable.device):
            continue
        if not variable.shape.is_fully_defined():
            raise ValueError(
                f"The function {name!r} uses the variable {variable.name!r} on a parameter server, whose shape "
                f"{variable.shape} has unknown dimensions. TensorFlow's workers end, or compute wrong values, when "
                "they are sent one. Create it with the largest shape that it may have, and use a part of it."
            )


@dataclasses.dataclass(slots=True, eq=False)
class ScheduledCall:
    """One scheduled call of a traced function. The runtime runs it for a closure, alone or in a fused call.

    Attributes:
      iterators: the per-worker iterators among the arguments.
      fusion_key: calls with equal keys may run as one call; None if this call must run alone.
      futures: the futures among the arguments; they are done when the call runs.
      followers: callbacks of the ranges of examples among the arguments; get this call's future before the call runs.
      repeats: repeats the call if its result, left on the worker, is lost. None copies the result to the client.
    """

    function: TracedFunction
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    iterators: Sequence[PerWorkerIterator] = ()
    fusion_key: FusionKey | None = None
    futures: Sequence[Future] = ()
    followers: Sequence[Callable[[Future], object]] = ()
    repeats: Repeats | None = None

    @property
    def inputs(self) -> tuple[FiniteInput, ...]:
        """The data of the call's iterators, which may end."""
        return tuple([iterator.input for iterator in self.iterators])

    def __call__(self, context: WorkerContext) -> Any:
        """Runs the call; unless `repeats` is set, copies the result to the client, where it outlives the worker."""
        if self.repeats is not None:
            return LeftResult(self, self.repeats, context, self.outputs_on(context))
        return self._run(context, functools.partial(tf.nest.map_structure, on_client))

    def outputs_on(self, context: WorkerContext) -> Any:
        """Runs the call; its outputs stay on the worker."""

        def computed(outputs: Any) -> Any:
            """Waits until the outputs are computed."""
            tensors = [part for part in tf.nest.flatten(outputs, expand_composites=True) if isinstance(part, tf.Tensor)]
            if tensors:
                with tf.device(context.calling_device):
                    tf.size(tensors[0]).numpy()
            return outputs

        return self._run(context, computed)

    def fetching(self) -> "ScheduledCall":
        """Returns an equal call whose result is copied to the client."""
        return dataclasses.replace(self, repeats=None)

    def leaving(self, scheduler: Scheduler) -> "ScheduledCall":
        """Returns an equal call that is not fused, whose result stays on the worker; `scheduler` repeats the call."""
        repeats = Repeats(scheduler)
        followers = (*self.followers, repeats.follow)
        return dataclasses.replace(self, repeats=repeats, followers=followers, fusion_key=None)

    def _run(self, context: WorkerContext, finish: Callable[[Any], Any]) -> Any:
        """Runs the call and returns `finish(outputs)`. An error of the function may first be raised in `finish`."""
        args, kwargs = self.args, self.kwargs
        if self.futures:
            args, kwargs = tf.nest.map_structure(
                lambda leaf: _result_for(leaf, context) if isinstance(leaf, Future) else leaf,
                (tuple(args), dict(kwargs)),
            )
        if not self.iterators:
            return finish(self.function.call_on(context, args, kwargs))
        with iterators_in_use(self.iterators, context):
            self._count_elements(context, 1)
            return finish(self.function.call_on(context, args, kwargs))

    def prepare(self, like: "ScheduledCall", count: int, context: WorkerContext) -> None:
        """Has a fused call of `count` calls built and prepared on a worker.

        `like`, another call with this fusion key, shows which inputs the calls share. For many runs, `like` is `self`.
        """
        bound = self.function.inputs_on(context, self.args, self.kwargs)
        is_shared = (True,) * len(bound) if like is self else self._stacked_inputs([self, like], context).is_shared
        values = [
            value if is_one else tf.TensorSpec([count, *value.shape], value.dtype)
            for value, is_one in zip(bound, is_shared, strict=True)
        ]
        self.function.prepare_fused(context, StackedInputs(count, values, is_shared))

    def most_fused_on(self, worker: int) -> int:
        """Returns how many calls with this fusion key may run as one on `worker`; less than 2 if the call runs alone.

        No iterator may end on the worker during the fused call, because the end would be an error of all its calls.
        """
        most = sys.maxsize
        for iterator in self.iterators:
            if not iterator.positions.is_endless_on(worker):
                most = min(most, int(iterator.positions.left_on(worker) // max(self.function.elements_per_call, 1)))
        return most

    def run_fused(self, calls: Sequence["ScheduledCall"], context: WorkerContext) -> list[Any]:
        """Runs calls with equal fusion keys, this call first, in order as one; returns their results on the client."""
        inputs = self._stacked_inputs(calls, context)
        with iterators_in_use(self.iterators, context):
            self._count_elements(context, len(calls))
            results = self.function.call_fused(context, inputs)
        return [tf.nest.map_structure(on_client, result) for result in results]

    def _stacked_inputs(self, calls: Sequence["ScheduledCall"], context: WorkerContext) -> StackedInputs:
        leaves = [tf.nest.flatten((call.args, call.kwargs)) for call in calls]

        def bind(flat: Sequence[Any]) -> Sequence[Any]:
            args, kwargs = tf.nest.pack_sequence_as((self.args, self.kwargs), flat)
            return self.function.inputs_on(context, args, kwargs)

        inputs = StackedInputs.of_arguments(leaves, bind)
        return inputs or StackedInputs.of_steps(
            [call.function.inputs_on(context, call.args, call.kwargs) for call in calls]
        )

    def run_steps(self, count: int, context: WorkerContext) -> Any:
        """Runs the call `count` times as one; returns the results on the client, stacked along a new first axis."""
        if count == 1:
            return tf.nest.map_structure(lambda value: value if value is None else stacked([value]), self(context))
        values = self.function.inputs_on(context, self.args, self.kwargs)
        with iterators_in_use(self.iterators, context):
            self._count_elements(context, count)
            return self.function.call_stacked(context, StackedInputs(count, values, (True,) * len(values)))

    def _count_elements(self, context: WorkerContext, calls: int) -> None:
        """Counts the elements that `calls` runs will take from the iterators; called before the runs."""
        for iterator in self.iterators:
            iterator.value_on(context)
            if not iterator.positions.is_endless_on(context.index):
                iterator.positions.count_on(context.index, calls * self.function.elements_per_call)


def _result_for(future: Future, context: WorkerContext) -> Any:
    value = future.unfetched_result()
    return value.value_on(context) if isinstance(value, LeftResult) else value


def _own_copy(value: Any, context: WorkerContext) -> Any:
    return value.value_on(context) if isinstance(value, PerWorkerResource | LateRange) else value
