"""Datasets and iterators of which every worker has its own."""

from collections.abc import Callable
from typing import Any, NoReturn

import tensorflow as tf

from coordinator.ps_strategy.per_worker.resource import PerWorkerResource, WorkerContext


class PerWorkerIterator(PerWorkerResource, tf.types.experimental.SupportsTracingProtocol):
    """One iterator per worker. Pass it as an argument of a scheduled function and call `next` on it there.

    An iterator of a worker that was restarted begins anew, and so does one that was interrupted; see
    `interrupted_iterators`. When the last reference to this object goes, so do the iterators on the workers.
    """

    def __init__(self, name: str, element_spec: Any, build: Callable[[WorkerContext], tf.data.Dataset]) -> None:
        # Not kept by itself: what it is built with must not keep it alive.
        is_endless: dict[int, bool] = {}

        def build_iterator(context: WorkerContext) -> Any:
            dataset = build(context)
            is_endless[context.index] = bool(dataset.cardinality() == tf.data.INFINITE_CARDINALITY)
            return iter(dataset)

        super().__init__(f"iterator of {name}", build_iterator)
        self._is_endless = is_endless
        # On which incarnation of a worker a call with its iterator failed. Each is used by its worker's thread alone.
        self._failed: dict[int, int] = {}
        self._element_spec = element_spec

    def is_endless_on(self, worker: int) -> bool:
        """Whether the worker's iterator is made, and known never to come to an end."""
        return self._is_endless.get(worker, False)

    def may_be_interrupted_on(self, context: WorkerContext) -> bool:
        """Whether a call that used the worker's iterator failed."""
        return self._failed.get(context.index) == context.incarnation

    def note_failed_call_on(self, context: WorkerContext) -> None:
        """A call that used the worker's iterator failed."""
        self._failed[context.index] = context.incarnation

    def forget_failed_calls_on(self, context: WorkerContext) -> None:
        """The worker's iterator is not interrupted, or nothing can be done about it."""
        self._failed.pop(context.index, None)

    def begin_anew_on(self, context: WorkerContext) -> None:
        """The worker's iterator is made again when it is next used."""
        self.forget_failed_calls_on(context)
        self.make_anew_on(context)

    @property
    def element_spec(self) -> Any:
        """The `tf.TypeSpec` of an element, nested as elements are."""
        return self._element_spec

    def get_next(self) -> NoReturn:
        """Refused; see `__next__`."""
        self.__next__()

    def __iter__(self) -> "PerWorkerIterator":
        return self

    def __next__(self) -> NoReturn:
        raise RuntimeError(
            "A per-worker iterator gives elements on the workers alone. Pass it as an argument: "
            "strategy.schedule(step, args=(iterator,)), and call next(iterator) inside `step`."
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise _no_attribute(self, name)

    def __tf_tracing_type__(self, context: Any) -> Any:
        return tf.data.IteratorSpec(self._element_spec)


class PerWorkerDataset(PerWorkerResource, tf.types.experimental.SupportsTracingProtocol):
    """One dataset per worker. `iter` of it gives a `PerWorkerIterator`; it may be a function's argument itself.

    Args:
      name: for people.
      element_spec: the `tf.TypeSpec` of an element, nested as elements are.
      build: makes the worker's dataset; called on the worker's thread, inside its device scope.
      prepare: asks every worker to make its copy of a resource ahead of its first use.
    """

    def __init__(
        self,
        name: str,
        element_spec: Any,
        build: Callable[[WorkerContext], tf.data.Dataset],
        prepare: Callable[[PerWorkerResource], None],
    ) -> None:
        super().__init__(name, build)
        self._element_spec = element_spec
        self._prepare = prepare

    @property
    def element_spec(self) -> Any:
        """The `tf.TypeSpec` of an element, nested as elements are."""
        return self._element_spec

    def __iter__(self) -> PerWorkerIterator:
        """New iterators, at the beginning of the data, one on each worker.

        Raises:
          RuntimeError: inside a `tf.function`.
        """
        if not tf.executing_eagerly():
            raise RuntimeError(
                "Make the iterator outside of the function, and pass it: strategy.schedule(step, args=(iterator,))."
            )
        iterator = PerWorkerIterator(self.name, self._element_spec, self._build)
        self._prepare(iterator)
        return iterator

    def __getattr__(self, name: str) -> NoReturn:
        raise _no_attribute(self, name)

    def __tf_tracing_type__(self, context: Any) -> Any:
        return tf.data.DatasetSpec(self._element_spec)


def _no_attribute(resource: PerWorkerResource, name: str) -> AttributeError:
    """What a function raises that is called with `resource` on the client: it looks for the handle of a real one."""
    return AttributeError(
        f"{type(resource).__name__} has no attribute {name!r}: it stands for one on each worker. A function that takes "
        "it must be scheduled: strategy.schedule(step, args=(...)) instead of step(...)."
    )
