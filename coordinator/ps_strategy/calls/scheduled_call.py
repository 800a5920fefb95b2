"""One scheduled call of a traced function: what the runtime runs for a closure, alone or fused with others."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from coordinator.future import Future
from coordinator.ps_strategy.calls.traced_function import TracedFunction
from coordinator.ps_strategy.fusing.repeated_function import is_stackable
from coordinator.ps_strategy.per_worker.dataset import PerWorkerIterator, iterators_in_use
from coordinator.ps_strategy.per_worker.resource import WorkerContext
from coordinator.runtime import FusionKey


class Work(Protocol):
    """What `TensorFlowRuntime` asks of the work that it runs."""

    def run_on(self, context: WorkerContext) -> Any:
        """Runs on a worker, and returns a result that is on the client."""


@dataclasses.dataclass(slots=True, eq=False)
class ScheduledCall:
    """One scheduled call. Implements `Work`.

    Attributes:
      function: the function.
      args: its positional arguments, per-worker resources among them.
      kwargs: its keyword arguments.
      iterators: the per-worker iterators among the arguments.
      fusion_key: calls with equal keys may run in one call; None if this one runs alone.
      takes_futures: whether futures are among the arguments; they are done when it runs.
    """

    function: TracedFunction
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    iterators: Sequence[PerWorkerIterator] = ()
    fusion_key: FusionKey | None = None
    takes_futures: bool = False

    def run_on(self, context: WorkerContext) -> Any:
        """Runs it and copies its result to the client, so that the result outlives the worker."""
        args, kwargs = self.args, self.kwargs
        if self.takes_futures:
            args, kwargs = tf.nest.map_structure(
                lambda leaf: leaf.result(timeout=0) if isinstance(leaf, Future) else leaf, (tuple(args), dict(kwargs))
            )
        with iterators_in_use(self.iterators, context):
            outputs = self.function.call_on(context, args, kwargs)
            return tf.nest.map_structure(_on_client, outputs)

    def may_fuse_on(self, worker: int) -> bool:
        """Returns whether it may run on `worker` in one call with others that have its fusion key.

        Its iterators must be endless there, since the end of one in the middle of a call would be an error of all.
        """
        return all(iterator.is_endless_on(worker) for iterator in self.iterators)

    def run_fused(self, calls: Sequence["ScheduledCall"], context: WorkerContext) -> list[Any]:
        """Runs calls that have its fusion key, itself the first, one after the other in one call.

        Returns:
          Their results, on the client.
        """
        leaves = [tf.nest.flatten((call.args, call.kwargs)) for call in calls]
        if all(one is other for each in leaves[1:] for one, other in zip(leaves[0], each, strict=True)):
            steps = [self.function.inputs_on(context, self.args, self.kwargs)] * len(calls)
        else:
            steps = [call.function.inputs_on(context, call.args, call.kwargs) for call in calls]
        with iterators_in_use(self.iterators, context):
            results = self.function.call_fused(context, steps)
        return [tf.nest.map_structure(_on_client, result) for result in results]


def fusion_key_of(function: TracedFunction, leaves: Sequence[Any]) -> FusionKey | None:
    """Returns the key of a call: its function, and for each argument what calls in one must have in common.

    Args:
      function: the function.
      leaves: the flattened arguments, defaults included, without futures.
    """
    if not function.may_be_fused:
        return None
    return FusionKey(function.token, tuple(map(_in_common, leaves)))


def _in_common(leaf: Any) -> Hashable:
    if not is_stackable(leaf):
        # Calls keep their arguments alive, so no other object has this identity meanwhile.
        return id(leaf)
    return type(leaf), tuple(getattr(leaf, "shape", ()))


def _on_client(value: Any) -> Any:
    """Returns NumPy values for a tensor; a ragged, sparse or other composite tensor as itself, on the client."""
    if isinstance(value, tf.Tensor):
        return value.numpy()
    return tf.nest.map_structure(
        lambda part: tf.constant(part.numpy()) if isinstance(part, tf.Tensor) else part, value, expand_composites=True
    )
