"""Exact evaluation: workers evaluate shards of the data, and what their metrics add up to counts once.

    data --> shards --> strategy.schedule --> a worker: the state of the metrics after the batches of a shard
                                                                                     |
    results <-- the initial state of the metrics, and what each shard has added <----'

Nothing on a parameter server changes. A shard whose worker is lost is evaluated again; its future has one result.
"""

import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tensorflow as tf

from coordinator.data.source import Source, range_vector
from coordinator.ps_strategy.keras.feeds import CALLS_PER_WORKER, Feed, worker_count
from coordinator.ps_strategy.keras.shard_functions import MetricTotals, NotShardableError, ShardFunctions
from coordinator.ps_strategy.keras.steps import ModelSteps
from coordinator.ps_strategy.per_worker.dataset import PerWorkerDataset

_logger = logging.getLogger("coordinator")

# Enough that workers of different speed end at about the same time, and that a lost one has little to repeat.
_SHARDS_PER_WORKER = 4
# The batches of a shard, if the number of all batches is not known.
_BATCHES_PER_SHARD = 16
# The maximum that is sent with one call, in bytes; a batch may be larger.
_LARGEST = 2**24


class ShardCall(NamedTuple):
    """A call to schedule: a `tf.function` and its arguments.

    Attributes:
      batches: how many batches it evaluates, if `Shards.are_counted`.
      worker: the only one that may run it, or None.
    """

    function: Any
    args: tuple[Any, ...]
    batches: int
    worker: int | None = None


class Shards(ABC):
    """Data that is evaluated in shards. `are_counted`: whether the number of batches of each call is known."""

    are_counted = True

    @abstractmethod
    def calls(self, functions: ShardFunctions) -> Iterator[ShardCall]:
        """Yields the call for each shard, in order."""

    @abstractmethod
    def trial(self, functions: ShardFunctions) -> ShardCall | None:
        """Returns a call that tries two batches; None if there are not two."""


def shard_count(shards: int | None, strategy: Any) -> int:
    """Returns the number of shards; while there is no worker, the number for one worker, which may come."""
    return _SHARDS_PER_WORKER * worker_count(strategy) if shards is None else shards


class ClientShards(Shards):
    """Batches that are read on the client and sent along.

    Args:
      batches: nested tensors; parts may be None.
      count: how many there are; None if that is not known.
      shards: how many shards there should be. There are more if one call would send many bytes.
    """

    def __init__(self, batches: Iterator[Any], count: int | None, shards: int) -> None:
        self._batches = batches
        self._most = _BATCHES_PER_SHARD if count is None else max(1, math.ceil(count / shards))
        self._first: list[Any] = []

    def all_batches(self) -> Iterator[Any]:
        """Returns the batches from the first on; at most one of `calls` must have been asked for."""
        return itertools.chain(self._first, self._batches)

    def calls(self, functions: ShardFunctions) -> Iterator[ShardCall]:
        """See `Shards`."""
        group: list[Any] = []
        is_first = True
        for batch in self.all_batches():
            if group and not _may_follow(group, batch, self._most):
                self._first = [*group, batch] if is_first else []
                yield _call(functions, group)
                group, is_first = [], False
            group.append(batch)
        if group:
            yield _call(functions, group)

    def trial(self, functions: ShardFunctions) -> ShardCall | None:
        """See `Shards`."""
        self._first += itertools.islice(self._batches, 2)
        return ShardCall(functions.trial_of_batches, tuple(self._first), 2) if len(self._first) == 2 else None


def _call(functions: ShardFunctions, batches: Sequence[Any]) -> ShardCall:
    """Returns the call for batches that may follow each other."""
    size = _size(batches[0])
    if size is None:
        return ShardCall(functions.of_batches, (tuple(batches),), len(batches))
    parts = [[leaf for leaf in tf.nest.flatten(batch) if leaf is not None] for batch in batches]
    joined = [leaves[0] if len(leaves) == 1 else tf.concat(leaves, 0) for leaves in zip(*parts, strict=True)]
    return ShardCall(functions.of_examples(batches[0]), (joined, np.int64(size)), len(batches))


def _may_follow(group: Sequence[Any], batch: Any, most: int) -> bool:
    """Returns True if a batch can be in one call with the batches before, which all have the same size."""
    size, last, next_ = _size(group[0]), _size(group[-1]), _size(batch)
    if len(group) >= most or size is None or next_ is None or last != size or not 0 < next_ <= size:
        return False
    leaves = [leaf for leaf in tf.nest.flatten(group[0]) if leaf is not None]
    size_in_bytes = sum(int(leaf.shape.num_elements()) * max(1, leaf.dtype.size) for leaf in leaves)
    if (len(group) + 1) * size_in_bytes > _LARGEST:
        return False
    return all(map(_have_same_spec, tf.nest.flatten(group[0]), tf.nest.flatten(batch)))


def _size(batch: Any) -> int | None:
    """Returns the number of examples in a batch; None if it has other parts than tensors with this number of rows."""
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    if not leaves or not all(isinstance(leaf, tf.Tensor) and leaf.shape.rank for leaf in leaves):
        return None
    sizes = {leaf.shape[0] for leaf in leaves}
    return sizes.pop() if len(sizes) == 1 else None


def _have_same_spec(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape[1:] == other.shape[1:]


class RangeShards(Shards):
    """Ranges of a source, at most `shards`, which the workers read."""

    def __init__(self, source: Source, batch_size: int, shards: int) -> None:
        self._source = source
        self._batch_size = batch_size
        self._batches = math.ceil(math.ceil(source.size / batch_size) / shards)

    def calls(self, functions: ShardFunctions) -> Iterator[ShardCall]:
        """See `Shards`."""
        function, size = functions.of_source(self._source)[0], np.int64(self._batch_size)
        for positions in ranges_of(self._source, self._batch_size, self._batches):
            yield ShardCall(function, (positions, size), math.ceil(int(positions[2]) / self._batch_size))

    def trial(self, functions: ShardFunctions) -> ShardCall | None:
        """See `Shards`."""
        if self._source.size <= self._batch_size:
            return None
        first_two = itertools.islice(ranges_of(self._source, self._batch_size), 2)
        return ShardCall(functions.of_source(self._source)[1], tuple(first_two), 2)


def source_shards(source: Source, batch_size: int, shards: int) -> Shards:
    """Returns the shards of a source; at most `shards` if the workers read it."""
    if not source.is_on_client:
        return RangeShards(source, batch_size, shards)
    read = source.reader()
    batches = (
        tf.nest.map_structure(tf.convert_to_tensor, read(positions)[1]) for positions in ranges_of(source, batch_size)
    )
    return ClientShards(batches, math.ceil(source.size / batch_size), shards)


def ranges_of(source: Source, batch_size: int, batches: int = 1) -> Iterator[Any]:
    """Yields ranges of `batches` batches each, in order, until all examples of a source are in one."""
    width = batch_size * batches
    for start in range(0, source.size, width):
        yield range_vector(start, min(width, source.size - start), start // batch_size)


class WorkerShards(Shards):
    """The finite data of each worker; a lost worker is waited for, because only it has its data."""

    are_counted = False

    def __init__(self, dataset: PerWorkerDataset, workers: Sequence[int]) -> None:
        self._dataset = dataset
        self._workers = workers

    def calls(self, functions: ShardFunctions) -> Iterator[ShardCall]:
        """See `Shards`."""
        for worker in self._workers:
            yield ShardCall(functions.of_dataset, (self._dataset,), 0, worker)

    def trial(self, functions: ShardFunctions) -> ShardCall | None:
        """See `Shards`."""
        return ShardCall(functions.trial_of_dataset, (self._dataset,), 2, self._workers[0])


class EvaluationFeed(Feed):
    """Schedules shards, enough of them to keep the workers busy, and adds up the states of their metrics.

    In Keras' loop a turn ends when its batches have been scheduled; the last one, when all shards have finished. The
    logs of a turn are the results of all shards that have finished. `in_place` returns the feed for layers, steps and
    metrics that do not allow shards; None for an error.
    """

    def __init__(self, shards: Shards, strategy: Any, in_place: Callable[[], Feed] | None = None) -> None:
        super().__init__(strategy)
        self.has_own_data = isinstance(shards, WorkerShards)
        self._shards = shards
        self._in_place = in_place
        # The feed that `in_place` has returned, if shards are not possible.
        self._feed: Feed | None = None
        self._functions: ShardFunctions | None = None
        # The shards to come with their numbers, and the next of them; None after the last one.
        self._calls: Iterator[tuple[int, ShardCall]] = iter(())
        self._coming: tuple[int, ShardCall] | None = None
        self._totals: MetricTotals | None = None
        # The number of the last shard that has finished, by its place in the data, and what its last batch has logged.
        self._last_logs: tuple[int, Any] = (-1, {})
        # The number of batches that were scheduled, or were found, and that no turn has had yet.
        self._batches = 0
        self._results: Any = None

    def __next__(self) -> NoReturn:
        """Raises RuntimeError: Keras' loop schedules turns, it asks for no batch."""
        raise RuntimeError("The batches of an evaluation are sent to the workers, and cannot be read here.")

    def evaluate(self, functions: ShardFunctions) -> Any:
        """Evaluates all shards and returns the results of the metrics, as NumPy values.

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
        return self._results_so_far()

    def schedule(self, steps: ModelSteps) -> Any:
        """See `Feed`."""
        if self._feed is None and self._functions is None:
            self._begin(steps.shards)
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
        return self._results_so_far()

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
            self._last_logs = max(self._last_logs, (number, result["logs"]), key=lambda logs: logs[0])
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

    def _begin(self, functions: ShardFunctions | None) -> None:
        """Checks that the metrics can be added up, and schedules the first shards.

        Otherwise, and for a model that needs the order of its batches (None), it uses the feed of `in_place`.
        """
        self._functions = functions
        if functions is None:
            if self._in_place is None:
                raise ValueError(
                    "A layer of the model has stateful=True and needs the batch before each batch, but a source is "
                    "evaluated in shards, in any order. Give evaluate arrays, a dataset or a dataset function."
                )
            self._feed = self._in_place()
            return
        try:
            if not functions.are_sums and (trial := self._shards.trial(functions)):
                self._try(functions, trial)
            self._calls = enumerate(self._shards.calls(functions))
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
        functions.are_sums, others = MetricTotals(functions.metrics()).find_sums(*result["state"])
        if others:
            raise NotShardableError(
                f"the state of the metric {others[0]!r} is no sum over batches, and it has no method "
                "merge(state, other)"
            )

    def _fill(self) -> None:
        """Schedules shards until there are enough."""
        most = CALLS_PER_WORKER * worker_count(self._strategy)
        while self._coming is not None and len(self.unfinished) < most:
            number, call = self._coming
            self.add(self._strategy.schedule(call.function, args=call.args, worker=call.worker), number)
            if self._shards.are_counted:
                self._batches += call.batches
            self._coming = next(self._calls, None)

    def _results_so_far(self) -> Any:
        if self._results is None:
            assert self._functions is not None
            assert self._totals is not None
            functions, logs = self._functions, self._last_logs[1]
            # Logs that are not computed from the state of metrics are the last batch's, as in Keras.
            self._results = (
                {**logs, **functions.logs_of_state(self._totals.state())}
                if logs
                else self._totals.results(functions.results)
            )
        return self._results
