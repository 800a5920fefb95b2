"""This library, as one side of a benchmark."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import coordinator
from benchmarks.contestants.side import DatasetFunction


class Library:
    """See `Side`.

    Args:
      resolver: names the servers.
      partitioner: divides variables; None for none.
      **options: fields of `coordinator.Options` that differ from their defaults.

    Attributes:
      strategy: of the library.
    """

    may_have_rules = True

    def __init__(self, resolver: Any, partitioner: Any = None, **options: Any) -> None:
        self.strategy = coordinator.ParameterServerStrategy(resolver, partitioner, coordinator.Options(**options))

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """See `Side`."""
        return self.strategy.scope()

    def replicated(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """See `Side`: a scheduled function runs in a replica context."""
        return body

    def iterator(self, dataset_fn: DatasetFunction) -> Any:
        """See `Side`."""
        return iter(self.strategy.experimental_distribute_datasets_from_function(dataset_fn))

    def run(self, function: Any, args: Sequence[Any], count: int) -> None:
        """See `Side`."""
        for _ in range(count):
            self.strategy.schedule(function, args=args)
        self.strategy.join()

    def call(self, function: Any, args: Sequence[Any] = ()) -> Any:
        """See `Side`."""
        return self.strategy.schedule(function, args=args).result()

    def schedule(self, function: Any) -> Callable[[], Any]:
        """See `Side`."""
        return self.strategy.schedule(function).result

    def worker_index(self) -> tf.Tensor:
        """See `RecoverySide`."""
        return coordinator.get_current_worker_index()

    def join(self) -> None:
        """See `RecoverySide`."""
        self.strategy.join()

    def restore_from(self, manager: tf.train.CheckpointManager) -> None:
        """See `RecoverySide`."""
        self.strategy.restore_from(manager)


class LibraryGraph(Library):
    """The library, called in a loop of a `tf.function` of the client.

    Args:
      resolver: names the servers.
      is_plain: whether the body of the loop is one call of `schedule` and no more.
    """

    def __init__(self, resolver: Any, *, is_plain: bool) -> None:
        super().__init__(resolver)
        self._is_plain = is_plain
        self._loops: dict[Any, Any] = {}

    def run(self, function: Any, args: Sequence[Any], count: int) -> None:
        """See `Side`."""
        if function not in self._loops:
            self._loops[function] = self._plain_loop(function, args) if self._is_plain else self._loop(function, args)
        self._loops[function](tf.constant(count))

    def _plain_loop(self, function: Any, args: Sequence[Any]) -> Any:
        @tf.function
        def loop(count: tf.Tensor) -> None:
            for _ in tf.range(count):
                self.strategy.schedule(function, args=args)
            self.strategy.join()

        return loop

    def _loop(self, function: Any, args: Sequence[Any]) -> Any:
        @tf.function
        def loop(count: tf.Tensor) -> tf.Tensor:
            scheduled = 0
            for _ in tf.range(count):
                self.strategy.schedule(function, args=args)
                scheduled += 1
            self.strategy.join()
            return scheduled

        return loop


class LibraryDevices(Library):
    """The library, with the step on each device of a worker."""

    def replicated(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """See `Side`: each replica's gradients are reduced on the worker, and applied once."""
        return lambda *args: self.strategy.run(body, args)


class LibraryRuns(Library):
    """The library, with one future for all calls of a function."""

    def run(self, function: Any, args: Sequence[Any], count: int) -> None:
        """See `Side`."""
        self.strategy.schedule(function, args=args, steps=count)
        self.strategy.join()
