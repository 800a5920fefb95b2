"""What a benchmark asks of each way to have functions run."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

# Makes the input of one worker.
DatasetFunction = Callable[[tf.distribute.InputContext], tf.data.Dataset]


class Side(Protocol):
    """One way to have functions run. Each is made in a process of its own, since a process joins one cluster.

    Attributes:
      may_have_rules: whether `coordinator.updates` works in its scope.
    """

    may_have_rules: bool

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Where variables are made: they go to the parameter servers in turns, if there are any."""

    def replicated(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """The body of a step as this side wants it, so that Keras optimizers work in it."""

    def iterator(self, dataset_fn: DatasetFunction) -> Any:
        """What stands for each worker's own iterator among the arguments of a function."""

    def run(self, function: Any, args: Sequence[Any], count: int) -> None:
        """Has a `tf.function` called so many times, all known at once, and returns when each call has finished.

        What a call returns is brought to this process.
        """

    def call(self, function: Any, args: Sequence[Any] = ()) -> Any:
        """Has it called once, and returns the result, as NumPy values. Nothing else is under way."""

    def schedule(self, function: Any) -> Callable[[], Any]:
        """Asks for one call, and returns what waits for its result."""
