"""Batches that the client has, each of which goes to whichever worker is free."""

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from coordinator.future import Future
from coordinator.ps_strategy.keras_fit.feed import Feed
from coordinator.ps_strategy.keras_fit.model_steps import ModelSteps
from coordinator.ps_strategy.keras_fit.scheduler import Scheduler

_CALLS_AHEAD_PER_WORKER = 2


class ClientData:
    """A dataset that is read on the client, from the beginning in each of its feeds.

    Args:
      dataset: a `tf.data.Dataset`.
      strategy: what its batches are scheduled on.
      on_feed: told of each feed.
    """

    def __init__(
        self, dataset: tf.data.Dataset, strategy: Scheduler, on_feed: Callable[["ClientFeed"], object]
    ) -> None:
        self._dataset = dataset
        self._strategy = strategy
        self._on_feed = on_feed

    def __iter__(self) -> "ClientFeed":
        feed = ClientFeed(iter(self._dataset), self._strategy)
        self._on_feed(feed)
        return feed


class ClientFeed(Feed):
    """Sends batches along with the steps that take them, so that a step that runs again has the same batches again.

    Args:
      batches: nested tensors.
      strategy: what is scheduled on.
    """

    def __init__(self, batches: Iterator[Any], strategy: Scheduler) -> None:
        super().__init__(strategy)
        self._batches = batches
        self._last_read: Any = None
        # Batches that were scheduled before Keras asked for them, and what was scheduled.
        self._read_ahead: collections.deque[Any] = collections.deque()
        self._scheduled_ahead: collections.deque[Future] = collections.deque()

    def __next__(self) -> Any:
        """The next batch."""
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

    def has_given(self, batch: Any) -> bool:
        """Whether this is the very batch that was taken last."""
        return batch is self._last_read

    def schedule_ahead(self, steps: ModelSteps, batches: Sequence[Any]) -> Future:
        """Schedules the steps of the batches that were taken last, and those of some batches to come.

        Args:
          steps: `all_of` them is scheduled.
          batches: what was taken with `next`, `steps_per_call` at a time.

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


def schedule_batches(strategy: Scheduler, function: Any, batches: Sequence[Any]) -> Future:
    """Schedules a function of batches."""

    def present(part: Any) -> Any:
        # Where a batch has no part, such as no sample weights, Keras has an empty optional for it.
        return None if isinstance(part, tf.experimental.Optional) else part

    return strategy.schedule(function, args=(tf.nest.map_structure(present, tuple(batches)),))
