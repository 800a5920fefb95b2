"""What `schedule` is given: checked, and in the form in which the function is traced.

A future among the arguments stands for its result, which may not be there yet: the function is traced with the result's
type, and gets the result when it runs.
"""

import concurrent.futures
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.future import Future
from coordinator.ps_strategy.calls.traced_function import TracedFunction
from coordinator.ps_strategy.per_worker.resource import PerWorkerHandles


@dataclasses.dataclass(frozen=True)
class ScheduleArguments:
    """The arguments of one call.

    Attributes:
      args: the positional ones, futures among them.
      kwargs: the keyword arguments, likewise.
      futures: those futures.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    futures: Sequence[Future]

    @classmethod
    def of(cls, args: Any, kwargs: Any, handles: PerWorkerHandles) -> "ScheduleArguments":
        """Checks what a user gave.

        Args:
          args: a list or tuple, or None for none.
          kwargs: a dict, or None for none.
          handles: those of the strategy, which tell its own futures from others.

        Raises:
          TypeError: `args` or `kwargs` is something else.
          ValueError: there is a future among them that did not come from this strategy.
        """
        args = () if args is None else args
        kwargs = {} if kwargs is None else kwargs
        if not isinstance(args, list | tuple):
            raise TypeError(f"args must be a list or tuple of the function's arguments, got {type(args).__name__}.")
        if not isinstance(kwargs, Mapping):
            raise TypeError(f"kwargs must be a dict of the function's keyword arguments, got {type(kwargs).__name__}.")
        futures = [leaf for leaf in tf.nest.flatten((args, kwargs)) if isinstance(leaf, concurrent.futures.Future)]
        return cls(args, kwargs, [_own(future, handles) for future in futures])

    def to_trace(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments with the type of each future's result in its place."""
        if not self.futures:
            return self.args, self.kwargs
        args, kwargs = tf.nest.map_structure(_spec_of_future, (tuple(self.args), dict(self.kwargs)))
        return args, kwargs


def _own(future: concurrent.futures.Future[Any], handles: PerWorkerHandles) -> Future:
    if isinstance(future, Future):
        origin = future.origin
        if isinstance(origin, TracedFunction) and origin.was_traced_with(handles):
            return future
    raise ValueError(
        f"{future!r} was given as an argument, but did not come from schedule of this strategy. Wait for it and pass "
        "its value: strategy.schedule(fn, args=(future.result(),))."
    )


def _spec_of_future(leaf: Any) -> Any:
    return leaf.origin.result_spec if isinstance(leaf, Future) else leaf
