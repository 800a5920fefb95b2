"""Feeds: in each turn (iteration) of Keras' loop, a feed schedules steps and collects their results.

Feed                      schedules steps, waits for them
  ClientFeed              sends batches of the client along with the steps that take them
  WorkerFeed              each step takes the next batches of the worker that runs it, whose data is endless
    FiniteWorkerFeed      counts only the steps that found data, until the data of every worker has ended
  RangeFeed               sends the numbers of a range of examples, which the step reads (`range_fits`)
  EvaluationFeed          evaluates shards of the data and adds up what they return (`exact_evaluation`)
"""

import abc
import concurrent.futures
import itertools
import logging
import queue
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import tensorflow as tf
from typing_extensions import Self

from coordinator.data.source import Source
from coordinator.future import Future
from coordinator.ps_strategy.keras.steps import ModelSteps
from coordinator.ps_strategy.per_worker.dataset import PerWorkerDataset

_logger = logging.getLogger("coordinator")

# The maximum number of unfinished calls per worker, if any worker may run each call.
CALLS_PER_WORKER = 4
# The maximum if calls are short: while one call runs, enough calls wait to be fused into one call (see `fusing`).
_SHORT_CALLS_PER_WORKER = 8
# Calls are short if as many calls as this maximum allows finish within these seconds. Logs are then recent anyway.
_SHORT_SECONDS = 0.4
# The number of calls of `predict` that are scheduled before Keras asks for them.
_CALLS_AHEAD_PER_WORKER = 2
# The calls per worker of a `FiniteWorkerFeed`: one runs and one waits, so that the worker does not wait for the client.
_STEPS_PER_WORKER = 2


class Feed(abc.ABC):
    """Schedules steps with the batches of one or several epochs, and collects their results. For one thread.

    A feed schedules enough calls to keep all workers busy, and so few that logs are recent.

    Attributes:
      unfinished: the calls that the feed has not waited for yet, each with the `number` that was given to `add`.
      newest_result: the result of the call that finished last in this epoch, or None.
      has_own_data: whether each worker reads data of its own, in order.
    """

    has_own_data = False

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._stall_interval: float = strategy.extended.services.options.stall_report_interval
        self._finished: queue.SimpleQueue[Future] = queue.SimpleQueue()
        # The times at which the last calls were seen to have finished, by the monotonic clock.
        self._ends: deque[float] = deque()
        self.unfinished: dict[Future, int | None] = {}
        self.newest_result: Any = None
        # Whether this epoch has had a turn with training steps.
        self._has_trained = False
        # The logs that Keras got for the last turn. Keras may report them for the epoch.
        self._given: Any = None

    def __iter__(self) -> Self:
        return self

    def train(self, steps: ModelSteps) -> Any:
        """Schedules a turn of training; see `schedule`. Raises ValueError if the epoch would have no step."""
        try:
            logs = self.schedule(steps)
        except StopIteration:
            if not self._has_trained:
                raise ValueError(
                    "The data of fit have no batch for this epoch, so it would have no step: they are empty, or can be "
                    "read only once and were read to the end. Give fit data that can be read again in each epoch, or "
                    "fewer epochs."
                ) from None
            raise
        self._has_trained = True
        return logs

    @abc.abstractmethod
    def schedule(self, steps: ModelSteps) -> Any:
        """Schedules the steps of a turn, waits for room for more, and returns the newest result of this epoch's steps.

        Raises StopIteration if no batch is left, and the errors of earlier steps. Raises `tf.errors.OutOfRangeError` if
        the number of steps in an epoch is given and the data of a worker has ended.
        """

    def add(self, future: Future, number: int | None = None) -> None:
        """Adds a scheduled call; `wait_one` returns `number` with the result of the call."""
        self.unfinished[future] = number
        future.add_done_callback(self._finished.put)  # type: ignore[arg-type]  # it passes this very future

    def wait_room(self) -> Any:
        """Waits until another call may be added and at least one result is known; returns the newest result."""
        # The limit is computed once a turn: it changes only when a worker joins or leaves, or calls become shorter.
        most = self._most_calls()
        while len(self.unfinished) >= most:
            self.wait_one()
        while not self._finished.empty() or (self.newest_result is None and self.unfinished):
            self.wait_one()
        self._given = dict(self.newest_result) if isinstance(self.newest_result, dict) else self.newest_result
        return self._given

    def wait_one(self) -> tuple[Any, int | None]:
        """Waits for the next call to finish; returns its result and its number (see `add`), or raises its error."""
        future = self._next_finished()
        number = self.unfinished.pop(future)
        if not future.completed:
            self.unfinished.clear()
            # `join` raises the first error, which may be the error of another call.
            self._strategy.join()
        self.newest_result = future.result()
        self._ends.append(time.monotonic())
        return self.newest_result, number

    def wait_finished(self) -> None:
        """Waits for all calls, then forgets their results; copies the newest result into the logs of the last turn."""
        while self.unfinished:
            self.wait_one()
        if isinstance(self._given, dict) and isinstance(self.newest_result, dict):
            self._given.update(self.newest_result)
        self.newest_result = self._given = None
        self._has_trained = False

    def _most_calls(self) -> int:
        workers = worker_count(self._strategy)
        most = _SHORT_CALLS_PER_WORKER * workers
        while len(self._ends) > most:
            self._ends.popleft()
        is_short = len(self._ends) == most and self._ends[-1] - self._ends[0] < _SHORT_SECONDS
        return most if is_short else CALLS_PER_WORKER * workers

    def _next_finished(self) -> Future:
        began = time.monotonic()
        while True:
            try:
                return self._finished.get(timeout=self._stall_interval)
            except queue.Empty:
                _report_stall(self._strategy, began, len(self.unfinished))


class ClientFeed(Feed):
    """A feed that sends each step its batches, so that a step that runs again has the same batches.

    `batches` yields nested tensors, or results of `source.reader()` if the steps of a prediction read a source.
    """

    def __init__(self, batches: Iterator[Any], strategy: Any, source: Source | None = None) -> None:
        super().__init__(strategy)
        self._batches = batches
        self._source = source
        self.last_read: Any = None
        # Batches that were scheduled before Keras asked for them.
        self._read_ahead: deque[Any] = deque()
        # The futures of the calls with these batches.
        self._scheduled_ahead: deque[Future] = deque()

    def __next__(self) -> Any:
        self.last_read = self._read_ahead.popleft() if self._read_ahead else next(self._batches)
        return self.last_read

    def schedule(self, steps: ModelSteps) -> Any:
        batches = tuple(itertools.islice(self, steps.steps_per_call))
        if not batches:
            raise StopIteration
        self.add(schedule_batches(self._strategy, steps.last_of, batches))
        return self.wait_room()

    def schedule_ahead(self, steps: ModelSteps, batches: Sequence[Any]) -> Future:
        """Schedules `steps.all_of` with the batches that the caller has read last, and with some following batches.

        The caller has read `batches`, `steps_per_call` batches, with `next`. Returns the future of the call for them.
        """
        if self._source is not None:
            steps = steps.reading(self._source)
        ahead = self._scheduled_ahead
        future = ahead.popleft() if ahead else schedule_batches(self._strategy, steps.all_of, batches)
        while len(ahead) < _CALLS_AHEAD_PER_WORKER * len(self._strategy.cluster.workers):
            coming = tuple(itertools.islice(self._batches, steps.steps_per_call))
            if not coming:
                break
            self._read_ahead.extend(coming)
            ahead.append(schedule_batches(self._strategy, steps.all_of, coming))
        return future


class WorkerFeed(Feed):
    """A feed whose steps take the next batches of the worker that runs them, from a per-worker dataset."""

    has_own_data = True

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
        self.add(self._strategy.schedule(steps.of_next, args=(self._iterator,)))
        return self.wait_room()


class FiniteWorkerFeed(WorkerFeed):
    """A feed that ends when the data of every worker has ended, or when an epoch has had `calls_per_epoch` calls.

    A call that finds no data is not counted. Without a limit, each worker's data is read once. The feed then waits for
    a lost worker (`Options.affinity_timeout`), because no other worker has its data; the data of a worker that returns
    starts from the beginning. With a limit, any worker may run a call until the data of one worker has ended. If an
    epoch finds no data at all, because earlier epochs took all of it, all data starts from the beginning.
    """

    def __init__(self, dataset: PerWorkerDataset, strategy: Any, calls_per_epoch: int | None = None) -> None:
        super().__init__(dataset, strategy)
        self._dataset = dataset
        self._calls_per_epoch = calls_per_epoch
        self._calls = 0
        self._ended: set[int] = set()
        self._may_start_again = False

    def schedule(self, steps: ModelSteps) -> Any:
        """Keeps the workers busy until one more call has taken batches. See `Feed`."""
        while True:
            called = self._calls + len(self.unfinished)
            room = None if self._calls_per_epoch is None else self._calls_per_epoch - called
            for worker in self._free_places()[:room]:
                future = self._strategy.schedule(steps.of_next_if_any, args=(self._iterator,), worker=worker)
                self.add(future, worker)
            if not self.unfinished:
                if not self._may_start_again or self._calls:
                    raise StopIteration
                self._may_start_again = False
                self._iterator = iter(self._dataset)
                self._ended.clear()
                continue
            (taken, worker, result), _ = self.wait_one()
            if taken < steps.steps_per_call:
                self._ended.add(int(worker))
            if taken:
                self._calls += 1
                return result

    def wait_finished(self) -> None:
        super().wait_finished()
        self._may_start_again = self._calls_per_epoch is not None and self._calls > 0
        self._calls = 0

    def _free_places(self) -> list[int | None]:
        """Returns a worker for each call to schedule; None means any worker.

        A worker may be returned several times. If no call is scheduled, waits until there is a worker.
        """
        if self._calls_per_epoch is not None and not self._ended:
            return [None] * (_STEPS_PER_WORKER * worker_count(self._strategy) - len(self.unfinished))
        workers = [worker.index for worker in self._strategy.cluster.workers]
        if not workers and not self.unfinished:
            workers = worker_indices(self._strategy)
        present = Counter(self.unfinished.values())
        active = [worker for worker in workers if worker not in self._ended]
        return [worker for place in range(_STEPS_PER_WORKER) for worker in active if present[worker] <= place]


def schedule_batches(strategy: Any, function: Any, batches: Sequence[Any]) -> Future:
    return strategy.schedule(function, args=(tuple(map(present_parts, batches)),))


def present_parts(batch: Any) -> Any:
    """Returns a batch with None in place of missing parts, such as sample weights."""
    # Keras puts an empty optional in place of a missing part.
    return tf.nest.map_structure(lambda part: None if isinstance(part, tf.experimental.Optional) else part, batch)


def worker_count(strategy: Any) -> int:
    """Returns the number of workers, but 1 if there is none, because scheduled calls then wait for the next worker."""
    return max(1, len(strategy.cluster.workers))


def worker_indices(strategy: Any) -> list[int]:
    """Returns the indices of the workers; waits until there is one. Raises what `strategy.schedule` raises."""
    while not (indices := [worker.index for worker in strategy.cluster.workers]):
        result_of(strategy.schedule(_nothing), strategy)
    return indices


_nothing = tf.function(lambda: None, autograph=False)


_is_infinite = tf.function(lambda dataset: dataset.cardinality() == tf.data.INFINITE_CARDINALITY)


def is_endless(dataset: PerWorkerDataset, strategy: Any, is_counted: bool = False) -> bool:
    """Returns True if the data of some worker is infinite. If the steps are counted, only one worker is asked."""
    # Without a count of steps, all workers' data must end. With a count, the call must not wait for a lost worker.
    workers = [None] if is_counted else worker_indices(strategy)
    futures = [strategy.schedule(_is_infinite, args=(dataset,), worker=worker) for worker in workers]
    return any(result_of(future, strategy) for future in futures)


def result_of(future: Future, strategy: Any) -> Any:
    """Returns the result of a call after waiting for it; a long wait is logged.

    Raises the error of the call. Later calls of the strategy do not raise this error again.
    """
    began = time.monotonic()
    while not concurrent.futures.wait([future], strategy.extended.services.options.stall_report_interval).done:
        _report_stall(strategy, began, 1)
    try:
        return future.result()
    except Exception:
        strategy.join()
        raise


def _report_stall(strategy: Any, began: float, scheduled: int) -> None:
    text = "No step has finished for %.0f s, %d are scheduled: %s."
    _logger.warning(text, time.monotonic() - began, scheduled, strategy.cluster.statistics())
