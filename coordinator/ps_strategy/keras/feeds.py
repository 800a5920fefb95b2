"""A feed that evaluates shards and adds up what they return.

Feeds: what Keras' loop is given for each of its turns, the batches to come and the steps that were scheduled.

Feed              schedules steps, waits for them
  ClientFeed        batches of the client, sent along with the steps that take them
  WorkerFeed        each step takes the next batches of the worker that runs it, whose data is endless
  FiniteWorkerFeed  as above, and counts only those that found data, until the data of every worker has ended
"""

import abc
import concurrent.futures
import itertools
import logging
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Self

import tensorflow as tf

from coordinator.future import Future
from coordinator.ps_strategy.keras.shard_functions import NotShardableError, ShardFunctions
from coordinator.ps_strategy.keras.shards import MetricTotals, ShardCall, Shards, WorkerShards
from coordinator.ps_strategy.keras.steps import ModelSteps
from coordinator.ps_strategy.per_worker.dataset import PerWorkerDataset

_logger = logging.getLogger("coordinator")

# The maximum number of unfinished calls per worker, where any worker may run each.
CALLS_PER_WORKER = 4
# The same where these take less than `_SHORT_SECONDS` together: then one call may run while as many wait as share a
# call (see `coordinator.fusing`), and logs are recent anyway.
_SHORT_CALLS_PER_WORKER = 8
_SHORT_SECONDS = 0.4
# Those of `predict` that are scheduled before Keras asks for them.
_CALLS_AHEAD_PER_WORKER = 2
# One runs and one waits, so that a worker does not wait for the client.
_STEPS_PER_WORKER = 2


class Feed(abc.ABC):
    """Schedules steps with the next batches of one or several epochs, and collects their results. For one thread.

    Enough calls are scheduled to keep all workers busy, and few enough that logs are recent.

    Args:
      strategy: the strategy that steps are scheduled on.

    Attributes:
      unfinished: the calls that were not waited for yet, each with the number that it was added with, or None.
      newest_result: the result of the call that finished last in this epoch, or None.
      has_trained: whether a turn of this epoch had steps of training.
      has_own_data: whether each worker reads data of its own, in their order.
    """

    has_own_data = False

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._finished: queue.SimpleQueue[Future] = queue.SimpleQueue()
        # When the last calls were seen to have finished, by the monotonic clock.
        self._ends: deque[float] = deque()
        self.unfinished: dict[Future, int | None] = {}
        self.newest_result: Any = None
        self.has_trained = False
        # What Keras was given for the last turn. It may report that for the epoch.
        self._given: Any = None

    def __iter__(self) -> Self:
        return self

    def train(self, steps: ModelSteps) -> Any:
        """Schedules the steps of a turn of training; see `schedule`.

        Raises:
          ValueError: the epoch would have no step.
        """
        try:
            logs = self.schedule(steps)
        except StopIteration:
            if not self.has_trained:
                raise ValueError(
                    "The data of fit have no batch for this epoch, so it would have no step: they are empty, or can be "
                    "read only once and were read to the end. Give fit data that can be read again in each epoch, or "
                    "fewer epochs."
                ) from None
            raise
        self.has_trained = True
        return logs

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

    def add(self, future: Future, number: int | None = None) -> None:
        """Adds a call that was scheduled; `number` is returned with its result."""
        self.unfinished[future] = number
        future.add_done_callback(self._finished.put)  # type: ignore[arg-type]  # it passes this very future

    def wait_room(self) -> Any:
        """Waits until another call may be added and at least one result is known; returns the newest result.

        Raises:
          Exception: what a call raised.
        """
        while len(self.unfinished) >= self._most_calls():
            self.wait_one()
        while not self._finished.empty() or (self.newest_result is None and self.unfinished):
            self.wait_one()
        self._given = dict(self.newest_result) if isinstance(self.newest_result, dict) else self.newest_result
        return self._given

    def wait_one(self) -> tuple[Any, int | None]:
        """Waits for the next call to finish.

        Returns:
          Its result, and the number that it was added with.

        Raises:
          Exception: what the call raised.
        """
        future = self._next_finished()
        number = self.unfinished.pop(future)
        if future.cancelled() or future.exception() is not None:
            self.unfinished.clear()
            # Raises the first error, which may be that of another call.
            self._strategy.join()
            future.result()
        self.newest_result = future.result()
        self._ends.append(time.monotonic())
        return self.newest_result, number

    def wait_finished(self) -> None:
        """Waits for all calls, then forgets their results. The logs of the last turn become those of the last step.

        Raises:
          Exception: what a call raised.
        """
        while self.unfinished:
            self.wait_one()
        if isinstance(self._given, dict) and isinstance(self.newest_result, dict):
            self._given.update(self.newest_result)
        self.newest_result = self._given = None
        self.has_trained = False

    def _most_calls(self) -> int:
        """Returns how many calls may be unfinished."""
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
                return self._finished.get(timeout=_stall_interval(self._strategy))
            except queue.Empty:
                _report_stall(self._strategy, began, len(self.unfinished))


def worker_count(strategy: Any) -> int:
    """Returns the number of workers; 1 while there is none, so that what is scheduled waits for the next one."""
    return max(1, len(strategy.cluster.workers))


def worker_indices(strategy: Any) -> list[int]:
    """Returns the indices of the workers; waits until there is one.

    Raises:
      Exception: what `strategy.schedule` raises.
    """
    while not (indices := [worker.index for worker in strategy.cluster.workers]):
        result_of(strategy.schedule(_nothing), strategy)
    return indices


_nothing = tf.function(lambda: None, autograph=False)


def result_of(future: Future, strategy: Any) -> Any:
    """Waits for the result of a call and returns it; reports in the log that it waits for long.

    Raises:
      Exception: what the call raised, which the strategy does not raise again.
    """
    began = time.monotonic()
    while not concurrent.futures.wait([future], _stall_interval(strategy)).done:
        _report_stall(strategy, began, 1)
    try:
        return future.result()
    except Exception:
        strategy.join()
        raise


def _stall_interval(strategy: Any) -> float:
    interval: float = strategy.extended.services.options.stall_report_interval
    return interval


def _report_stall(strategy: Any, began: float, scheduled: int) -> None:
    text = "No step has finished for %.0f s, %d are scheduled: %s."
    _logger.warning(text, time.monotonic() - began, scheduled, strategy.cluster.statistics())


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
        self._read_ahead: deque[Any] = deque()
        self._scheduled_ahead: deque[Future] = deque()

    def __next__(self) -> Any:
        self._last_read = self._read_ahead.popleft() if self._read_ahead else next(self._batches)
        return self._last_read

    def schedule(self, steps: ModelSteps) -> Any:
        """See `Feed`."""
        batches = tuple(itertools.islice(self, steps.steps_per_call))
        if not batches:
            raise StopIteration
        self.add(schedule_batches(self._strategy, steps.last_of, batches))
        return self.wait_room()

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
    return strategy.schedule(function, args=(tuple(map(present_parts, batches)),))


def present_parts(batch: Any) -> Any:
    """Returns a batch with None for the parts that it does not have, such as sample weights."""
    # Keras has an empty optional for them.
    return tf.nest.map_structure(lambda part: None if isinstance(part, tf.experimental.Optional) else part, batch)


class WorkerFeed(Feed):
    """Schedules steps that take the next batches of the worker that runs them.

    Args:
      dataset: a per-worker dataset.
      strategy: the strategy that steps are scheduled on.
    """

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
        """See `Feed`."""
        self.add(self._strategy.schedule(steps.of_next, args=(self._iterator,)))
        return self.wait_room()


class FiniteWorkerFeed(WorkerFeed):
    """Schedules steps until the data of every worker has ended, or until an epoch has had the calls that it counts.

    A call that finds no data is not counted. Where nothing is counted, each worker's data is read once: a lost worker
    is waited for, because only it has its data (`Options.affinity_timeout`), which then starts from the beginning.
    Counted calls are for any worker, until the data of one has ended; an epoch that finds no data at all, because the
    one before took the last, starts from the beginning of all.

    Args:
      dataset: a per-worker dataset.
      strategy: the strategy that steps are scheduled on.
      calls_per_epoch: the maximum number of calls that take batches in an epoch; None for no limit.
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
            self._keep_busy(steps)
            if not self.unfinished:
                self._start_again()
                continue
            (taken, worker, result), _ = self.wait_one()
            if taken < steps.steps_per_call:
                self._ended.add(int(worker))
            if taken:
                self._calls += 1
                return result

    def wait_finished(self) -> None:
        """See `Feed`."""
        super().wait_finished()
        self._may_start_again = self._calls_per_epoch is not None and self._calls > 0
        self._calls = 0

    def _start_again(self) -> None:
        """Starts from the beginning of the data; raises StopIteration unless an earlier epoch has taken it all."""
        if not self._may_start_again or self._calls:
            raise StopIteration
        self._may_start_again = False
        self._iterator = iter(self._dataset)
        self._ended.clear()

    def _keep_busy(self, steps: ModelSteps) -> None:
        """Schedules calls for each worker that may have batches left, up to their limit."""
        room = None if self._calls_per_epoch is None else self._calls_per_epoch - self._calls - len(self.unfinished)
        for worker in self._free_places()[:room]:
            future = self._strategy.schedule(steps.of_next_if_any, args=(self._iterator,), worker=worker)
            self.add(future, worker)

    def _free_places(self) -> list[int | None]:
        """Returns the workers to schedule a call for, some several times; None is any worker.

        If nothing is scheduled, it waits until there is a worker.
        """
        if self._calls_per_epoch is not None and not self._ended:
            return [None] * (_STEPS_PER_WORKER * worker_count(self._strategy) - len(self.unfinished))
        workers = [worker.index for worker in self._strategy.cluster.workers]
        if not workers and not self.unfinished:
            workers = worker_indices(self._strategy)
        present = Counter(self.unfinished.values())
        active = [worker for worker in workers if worker not in self._ended]
        return [worker for place in range(_STEPS_PER_WORKER) for worker in active if present[worker] <= place]


class EvaluationFeed(Feed):
    """Schedules shards, enough of them to keep the workers busy, and adds up the states of their metrics.

    In Keras' loop a turn ends when its batches have been scheduled; the last one, when all shards have finished. The
    logs of a turn are the results of all shards that have finished.

    Args:
      shards: those of the data.
      strategy: the strategy that they are scheduled on.
      in_place: returns the feed for layers, steps and metrics that do not allow shards; None for an error.
    """

    def __init__(self, shards: Shards, strategy: Any, in_place: Callable[[], Feed] | None = None) -> None:
        super().__init__(strategy)
        self.has_own_data = isinstance(shards, WorkerShards)
        self._shards = shards
        self._in_place = in_place
        # What is used instead, if anything.
        self._feed: Feed | None = None
        self._functions: ShardFunctions | None = None
        self._calls: Iterator[ShardCall] = iter(())
        self._coming: ShardCall | None = None
        self._scheduled = 0
        self._totals: MetricTotals | None = None
        # The number of the last shard among those that have finished, and what its last batch has logged.
        self._last_logs: tuple[int, Any] = (-1, {})
        # The number of batches that were scheduled, or were found, and that no turn has had yet.
        self._batches = 0
        self._results: Any = None

    def __next__(self) -> NoReturn:
        """Raises RuntimeError: Keras' loop schedules turns, it asks for no batch."""
        raise RuntimeError("The batches of an evaluation are sent to the workers, and cannot be read here.")

    def evaluate(self, functions: ShardFunctions) -> Any:
        """Evaluates all shards and returns the results of the metrics, as NumPy values.

        Args:
          functions: what is scheduled.

        Raises:
          ValueError: the step or a metric does not allow shards; or there are no data.
          Exception: what a shard raised.
        """
        self._begin(functions)
        try:
            while self.unfinished:
                self.wait_one()
                self._fill()
        finally:
            for future in list(self.unfinished):
                future.cancel()
        if self._totals is None:
            raise ValueError("The data to evaluate are empty.")
        return self._results_so_far(functions)

    def schedule(self, steps: ModelSteps) -> Any:
        """See `Feed`."""
        functions = steps.shards
        if functions is None:
            if self._feed is None:
                self._feed = self._one_by_one()
            return self._feed.schedule(steps)
        if self._functions is None:
            self._begin(functions)
        if self._feed is not None:
            return self._feed.schedule(steps)
        self._fill()
        while self._batches < steps.steps_per_call and self.unfinished:
            self.wait_one()
            self._fill()
        if not self._batches:
            raise StopIteration
        self._batches = max(0, self._batches - steps.steps_per_call)
        is_last = not self._batches and self._coming is None
        while self.unfinished and (is_last or self._totals is None or not self._finished.empty()):
            self.wait_one()
        return self._results_so_far(functions)

    def wait_one(self) -> tuple[Any, int | None]:
        """See `Feed`."""
        result, number = super().wait_one()
        batches = int(result["batches"])
        if not self._shards.are_counted:
            self._batches += batches
        if batches:
            assert self._functions is not None
            assert number is not None
            self._totals = self._totals or MetricTotals(self._functions.metrics())
            self._totals.add(result["state"])
            self._last_logs = max(self._last_logs, (number, result["logs"]), key=lambda each: each[0])
            self._results = None
        return result, number

    def wait_finished(self) -> None:
        """Waits for all shards, and assigns their totals to the metrics, for Keras to read."""
        if self._feed is not None:
            self._feed.wait_finished()
            return
        super().wait_finished()
        totals, self._totals = self._totals, None
        if totals is not None:
            totals.assign()

    def _one_by_one(self) -> Feed:
        """Returns the feed for a model that needs the order of its batches."""
        if self._in_place is None:
            raise ValueError(
                "A layer of the model has stateful=True and needs the batch before each batch, but a source is "
                "evaluated in shards, in any order. Give evaluate arrays, a dataset or a dataset function."
            )
        return self._in_place()

    def _begin(self, functions: ShardFunctions) -> None:
        """Checks that the metrics can be added up, and schedules the first shards.

        Raises:
          ValueError: they cannot, and there is no other feed.
        """
        self._functions = functions
        try:
            if not functions.are_sums and (trial := self._shards.trial(functions)):
                self._try(functions, trial)
            self._calls = self._shards.calls(functions)
            self._coming = next(self._calls, None)
            self._fill()
        except NotShardableError as error:
            if self._in_place is None:
                raise ValueError(f"The evaluation cannot be divided into shards, because {error}.") from None
            if not functions.was_reported:
                functions.was_reported = True
                _logger.warning(
                    "Batches are evaluated one by one, and those of a lost worker may count twice, because %s.", error
                )
            self._feed = self._in_place()

    def _try(self, functions: ShardFunctions, trial: ShardCall) -> None:
        self.add(self._strategy.schedule(trial.function, args=trial.args, worker=trial.worker))
        result, _ = super().wait_one()
        if not int(result["batches"]):
            return
        totals = MetricTotals(functions.metrics())
        functions.are_sums, others = totals.find_sums(*result["state"])
        if others:
            raise NotShardableError(
                f"the state of the metric {others[0]!r} is no sum over batches, and it has no method "
                "merge(state, other)"
            )

    def _fill(self) -> None:
        """Schedules shards until there are enough."""
        most = CALLS_PER_WORKER * worker_count(self._strategy)
        while self._coming is not None and len(self.unfinished) < most:
            call = self._coming
            future = self._strategy.schedule(call.function, args=call.args, worker=call.worker)
            self.add(future, self._scheduled)
            self._scheduled += 1
            if self._shards.are_counted:
                self._batches += call.batches
            self._coming = next(self._calls, None)

    def _results_so_far(self, functions: ShardFunctions) -> Any:
        if self._results is None:
            assert self._totals is not None
            logs = self._last_logs[1]
            # Logs that are not computed from the state of metrics are those of the last batch, as in Keras.
            self._results = (
                {**logs, **functions.logs_of_state(self._totals.state())}
                if logs
                else self._totals.results(functions.results)
            )
        return self._results
