"""Results that stay on the worker that computed them until they are needed: `schedule(..., fetch=False)`.

    tensors on a worker --taken by a function on that worker--> passed as they are
                        --result(), or taken on another one---> copied to the client, once
                        --lost with the worker----------------> computed again from the arguments of the call

Guarantee: the result is there as long as its function can be run; whether it was run again is in `future.attempts`.
"""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

from coordinator.errors import StrategyClosedError
from coordinator.future import Future, ValueElsewhere
from coordinator.ps_strategy.membership.bounded_calls import on_own_thread
from coordinator.ps_strategy.per_worker.resource import WorkerContext
from coordinator.workers.scheduler import Scheduler


class RepeatableCall(Protocol):
    """A call whose result was left on a worker."""

    def outputs_on(self, context: WorkerContext) -> Any:
        """Runs it on a worker; its outputs stay there."""

    def fetching(self) -> "RepeatableCall":
        """Returns the same call, whose result is copied to the client."""


class Repeats:
    """Runs a call again whose result was lost.

    Args:
      scheduler: of the strategy; it is not kept alive.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = weakref.ref(scheduler)
        self._future: Callable[[], Future | None] = lambda: None

    def follow(self, future: Future) -> None:
        """Sets the future that counts the attempts."""
        self._future = weakref.ref(future)

    def count(self) -> None:
        """Counts one more attempt."""
        if (future := self._future()) is not None:
            future.attempts += 1

    def schedule(self, call: Any) -> Future:
        """Schedules a call. Raises StrategyClosedError."""
        scheduler = self._scheduler()
        if scheduler is None:
            raise StrategyClosedError("A result was lost with its worker, and the strategy does not exist any more.")
        return scheduler.schedule(call, call.function.name, origin=call.function, inputs=call.inputs)


class LeftResult(ValueElsewhere):
    """The result of a call, on a worker or, once it was copied, on the client.

    Args:
      call: computes it.
      repeats: runs the call again.
      context: the worker that has computed it.
      outputs: the tensors there.
    """

    def __init__(self, call: RepeatableCall, repeats: Repeats, context: WorkerContext, outputs: Any) -> None:
        self._call = call
        self._repeats = repeats
        # The worker and its connection, None for the client; and the values. Replaced as a whole: threads that need it
        # at the same time copy it, or compute it again, each for itself.
        self._held: tuple[tuple[int, int] | None, Any] = _place(context), outputs

    def fetch(self, timeout: float | None = None) -> Any:
        """Returns it, on the client; computes it again if it was lost. See `Future.result`."""
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
        """Returns it for a function on a worker, on whose thread this is called."""
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
    """Returns NumPy values for a tensor; a ragged, sparse or other composite tensor as itself, on the client."""
    if isinstance(value, tf.Tensor):
        return value.numpy()
    return tf.nest.map_structure(
        lambda part: tf.constant(part.numpy()) if isinstance(part, tf.Tensor) else part, value, expand_composites=True
    )


def wait_computed(outputs: Any, context: WorkerContext) -> None:
    """Waits until a function has computed its outputs, which stay on the worker. Raises what it raised."""
    tensors = [part for part in tf.nest.flatten(outputs, expand_composites=True) if isinstance(part, tf.Tensor)]
    if tensors:
        with tf.device(context.calling_device):
            tf.size(tensors[0]).numpy()


def _place(context: WorkerContext) -> tuple[int, int]:
    return context.index, context.connection_number


def copy_to_client(value: Any, timeout: float | None = None) -> Any:
    """Returns tensors of a worker, copied; raises OpError if they are lost."""
    # A separate executor: that of the present thread would keep the error.
    return on_own_thread("coordinator-fetch", lambda: tf.nest.map_structure(on_client, value)).result(timeout)
