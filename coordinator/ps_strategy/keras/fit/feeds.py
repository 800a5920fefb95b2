"""Feeds: what Keras' loop is given for each of its turns, the batches to come and the steps that were scheduled.

Feed              schedules steps, waits for them
  ClientFeed        batches of the client, sent along with the steps that take them
  WorkerFeed        each step takes the next batches of the worker that runs it; the loop counts the steps
  FiniteWorkerFeed  as above, until the data of every worker has ended
"""

import abc
import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Self

import tensorflow as tf

from coordinator.future import Future
from coordinator.ps_strategy.keras.fit.steps import ModelSteps, StepsInFlight
from coordinator.ps_strategy.per_worker.dataset import PerWorkerDataset

_CALLS_AHEAD_PER_WORKER = 2
# One runs and one waits, so that a worker does not wait for the client.
_STEPS_PER_WORKER = 2


class Feed(abc.ABC):
    """Schedules steps with the next batches of one or several epochs.

    Args:
      strategy: the strategy that steps are scheduled on.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._in_flight = StepsInFlight(strategy)

    def __iter__(self) -> Self:
        return self

    @abc.abstractmethod
    def schedule(self, steps: ModelSteps) -> Any:
        """Schedules the steps of a turn, after waiting for room.

        Returns:
          The newest result of this epoch's steps.

        Raises:
          StopIteration: no batch is left.
          Exception: what an earlier step raised; `tf.errors.OutOfRangeError` if a worker's data has ended although
            the loop counts its steps.
        """

    def wait_finished(self) -> None:
        """Waits for all steps; raises what one of them raised."""
        self._in_flight.wait_finished()


class ClientFeed(Feed):
    """Sends batches along with the steps that take them, so that a step that runs again has the same batches.

    Args:
      batches: nested tensors.
      strategy: the strategy that steps are scheduled on.
    """

    def __init__(self, batches: Iterator[Any], strategy: Any) -> None:
        super().__init__(strategy)
        self._batches = batches
        self._last_read: Any = None
        # Batches that were scheduled before Keras asked for them, and the futures of these calls.
        self._read_ahead: collections.deque[Any] = collections.deque()
        self._scheduled_ahead: collections.deque[Future] = collections.deque()

    def __next__(self) -> Any:
        self._last_read = self._read_ahead.popleft() if self._read_ahead else next(self._batches)
        return self._last_read

    def schedule(self, steps: ModelSteps) -> Any:
        """See `Feed`."""
        batches = tuple(itertools.islice(self, steps.steps_per_call))
        if not batches:
            raise StopIteration
        self._in_flight.add(schedule_batches(self._strategy, steps.last_of, batches))
        self._in_flight.wait_room()
        return self._in_flight.newest_result

    def was_read_last(self, batch: Any) -> bool:
        """Returns True if this very object is what `next` returned last."""
        return batch is self._last_read

    def schedule_ahead(self, steps: ModelSteps, batches: Sequence[Any]) -> Future:
        """Schedules the steps of the batches that were read last, and those of batches to come.

        Args:
          steps: its `all_of` is scheduled.
          batches: what was read with `next`, `steps_per_call` at a time.

        Returns:
          The future for these batches.
        """
        ahead = self._scheduled_ahead
        future = ahead.popleft() if ahead else schedule_batches(self._strategy, steps.all_of, batches)
        while len(ahead) < _CALLS_AHEAD_PER_WORKER * len(self._strategy.cluster.workers):
            coming = tuple(itertools.islice(self._batches, steps.steps_per_call))
            if not coming:
                break
            self._read_ahead.extend(coming)
            ahead.append(schedule_batches(self._strategy, steps.all_of, coming))
        return future


def schedule_batches(strategy: Any, function: Any, batches: Sequence[Any]) -> Future:
    """Schedules a function that takes a tuple of batches."""

    def present(part: Any) -> Any:
        # Where a batch has no part, such as no sample weights, Keras has an empty optional for it.
        return None if isinstance(part, tf.experimental.Optional) else part

    return strategy.schedule(function, args=(tf.nest.map_structure(present, tuple(batches)),))


class WorkerFeed(Feed):
    """Schedules steps that take the next batches of the worker that runs them.

    Args:
      dataset: a per-worker dataset.
      strategy: the strategy that steps are scheduled on.
    """

    def __init__(self, dataset: PerWorkerDataset, strategy: Any) -> None:
        super().__init__(strategy)
        self._iterator = iter(dataset)

    def __next__(self) -> NoReturn:
        """Raises ValueError: only `predict` asks for a batch."""
        raise ValueError(
            "predict cannot take a dataset function or a per-worker dataset: there would be no order in its outputs. "
            "Give it a tf.data.Dataset or arrays, or schedule a function that predicts."
        )

    def schedule(self, steps: ModelSteps) -> Any:
        """See `Feed`."""
        self._in_flight.add(self._strategy.schedule(steps.of_next, args=(self._iterator,)))
        self._in_flight.wait_room()
        return self._in_flight.newest_result


class FiniteWorkerFeed(WorkerFeed):
    """Schedules steps for each worker whose data has not ended.

    A lost worker is waited for, because only it has its data (`Options.affinity_timeout`); its data then starts from
    the beginning.
    """

    def __init__(self, dataset: PerWorkerDataset, strategy: Any) -> None:
        super().__init__(dataset, strategy)
        self._ended: set[int | None] = set()

    def schedule(self, steps: ModelSteps) -> Any:
        """Keeps the workers busy until one more call has taken batches. See `Feed`."""
        while True:
            self._keep_busy(steps)
            if not len(self._in_flight):
                raise StopIteration
            (taken, result), worker = self._in_flight.wait_one()
            if taken < steps.steps_per_call:
                self._ended.add(worker)
            if taken:
                return result

    def _keep_busy(self, steps: ModelSteps) -> None:
        """Schedules calls for each worker that may have batches left, up to their limit."""
        present = self._in_flight.count_by_worker()
        for worker in self._strategy.cluster.workers:
            if worker.index in self._ended:
                continue
            for _ in range(_STEPS_PER_WORKER - present[worker.index]):
                future = self._strategy.schedule(steps.of_next_if_any, args=(self._iterator,), worker=worker.index)
                self._in_flight.add(future, worker.index)
