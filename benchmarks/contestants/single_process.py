"""One process with the variables in its memory: without a cluster, the upper limit of its speed."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from benchmarks.contestants.side import DatasetFunction


class SingleProcess:
    """See `Side`. It uses as many cores as TensorFlow finds."""

    may_have_rules = False

    def __init__(self, _: Any) -> None:
        pass

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """See `Side`."""
        return contextlib.nullcontext()

    def replicated(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """See `Side`."""
        return body

    def iterator(self, dataset_fn: DatasetFunction) -> Any:
        """See `Side`."""
        return iter(dataset_fn(tf.distribute.InputContext()))

    def run(self, function: Any, args: Sequence[Any], count: int) -> None:
        """See `Side`."""
        for _ in range(count):
            self.call(function, args)

    def call(self, function: Any, args: Sequence[Any] = ()) -> Any:
        """See `Side`."""
        return tf.nest.map_structure(lambda value: None if value is None else value.numpy(), function(*args))

    def schedule(self, function: Any) -> Callable[[], Any]:
        """See `Side`."""
        return lambda: self.call(function)
