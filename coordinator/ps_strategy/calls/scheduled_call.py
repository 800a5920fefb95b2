"""One scheduled call of a traced function: what the runtime runs for a closure, alone or with others like it."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.future import Future
from coordinator.ps_strategy.calls.traced_function import TracedFunction
from coordinator.ps_strategy.fusing.repeated_function import is_stackable
from coordinator.ps_strategy.interrupted_iterators import iterators_in_use
from coordinator.ps_strategy.per_worker.resource import WorkerContext
from coordinator.ps_strategy.per_worker_dataset import PerWorkerIterator
from coordinator.runtime import Likeness


class ScheduledCall:
    """One scheduled call.

    Args:
      function: the function.
      args: its positional arguments, per-worker resources among them.
      kwargs: its keyword arguments.
      takes_futures: whether futures are among them, which are done by the time that it runs.

    Attributes:
      function, args, kwargs: as given.
    """

    def __init__(
        self, function: TracedFunction, args: Sequence[Any], kwargs: Mapping[str, Any], *, takes_futures: bool = False
    ) -> None:
        self._takes_futures = takes_futures
        self.function = function
        self.args = args
        self.kwargs = kwargs

    def run_on(self, context: WorkerContext) -> Any:
        """Runs it and brings its result to the client, so that it outlives the worker."""
        args, kwargs = self.args, self.kwargs
        if self._takes_futures:
            args, kwargs = tf.nest.map_structure(_result_of_future, (tuple(args), dict(kwargs)))
        with iterators_in_use((self.args, self.kwargs), context):
            outputs = self.function.call_on(context, args, kwargs)
            return tf.nest.map_structure(_on_client, outputs)

    def likeness_on(self, worker: int) -> Likeness | None:
        """Calls of equal likeness may run in one call on this worker. None: this one runs alone there.

        They call the same function with the same objects, but for numbers and strings of the same shapes. An iterator
        among them must be endless, since the end of one in the middle would be an error of all.
        """
        if self._takes_futures or not self.function.may_be_repeated:
            return None
        leaves = tf.nest.flatten((self.args, self.kwargs))
        if any(isinstance(leaf, PerWorkerIterator) and not leaf.is_endless_on(worker) for leaf in leaves):
            return None
        return Likeness(self.function.token, tuple(map(_in_common, leaves)))

    @staticmethod
    def run_together(calls: Sequence["ScheduledCall"], context: WorkerContext) -> list[Any]:
        """Runs calls of equal likeness, one after the other in one call; their results, on the client."""
        first = calls[0]
        leaves = [tf.nest.flatten((call.args, call.kwargs)) for call in calls]
        if all(one is other for each in leaves[1:] for one, other in zip(leaves[0], each, strict=True)):
            steps = [first.function.inputs_on(context, first.args, first.kwargs)] * len(calls)
        else:
            steps = [call.function.inputs_on(context, call.args, call.kwargs) for call in calls]
        with iterators_in_use((first.args, first.kwargs), context):
            results = first.function.call_repeatedly(context, steps)
        return [tf.nest.map_structure(_on_client, result) for result in results]


def _in_common(leaf: Any) -> Hashable:
    """What two calls must have in common in the place of this argument."""
    if not is_stackable(leaf):
        # Those that are compared hold their arguments, so no other object has this identity meanwhile.
        return id(leaf)
    shape = getattr(leaf, "shape", ())
    return type(leaf), tuple(shape)


def _result_of_future(leaf: Any) -> Any:
    return leaf.result(timeout=0) if isinstance(leaf, Future) else leaf


def _on_client(value: Any) -> Any:
    """NumPy values for a tensor; a ragged, sparse or other composite tensor as itself, on the client."""
    if isinstance(value, tf.Tensor):
        return value.numpy()
    return tf.nest.map_structure(
        lambda part: tf.constant(part.numpy()) if isinstance(part, tf.Tensor) else part, value, expand_composites=True
    )
