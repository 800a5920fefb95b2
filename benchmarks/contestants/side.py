"""The interface of each way to run functions that a benchmark compares."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

# Creates the dataset of one worker.
DatasetFunction = Callable[[tf.distribute.InputContext], tf.data.Dataset]


class Side(Protocol):
    """One way to run functions. Each is created in a separate process, since a process connects to one cluster only.

    Attributes:
      may_have_rules: True if `coordinator.updates` works in its scope.
    """

    may_have_rules: bool

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a scope in which variables are placed on the parameter servers in turn, if there are any."""

    def replicated(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the body of a step as this side needs it for Keras optimizers to work."""

    def iterator(self, dataset_fn: DatasetFunction) -> Any:
        """Returns the argument of a function in whose place each worker gets its own iterator."""

    def run(self, function: Any, args: Sequence[Any], count: int) -> None:
        """Schedules `count` calls of a `tf.function` at once, and returns when all have finished.

        The results are brought to this process.
        """

    def call(self, function: Any, args: Sequence[Any] = ()) -> Any:
        """Runs one call with nothing else in flight, and returns its result as NumPy values."""

    def schedule(self, function: Any) -> Callable[[], Any]:
        """Schedules one call, and returns a function that waits for its result."""
