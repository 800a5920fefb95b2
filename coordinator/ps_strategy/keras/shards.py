"""The shards of the data of an evaluation, as calls of `ShardFunctions`."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from coordinator.data.source import Source, range_vector
from coordinator.ps_strategy.keras.shard_functions import ShardFunctions, initial_state
from coordinator.ps_strategy.per_worker.dataset import PerWorkerDataset

_State = list[Any]


class MetricTotals:
    """Adds up the states of metrics that shards have returned.

    A metric's state after all shards is its initial state and what each shard has added to it. A metric that is no such
    sum may have a method `merge(state, other)`: it takes two states, lists with the values of `metric.variables`, and
    returns the state that all batches of both would have led to.

    Args:
      metrics: those of `ShardFunctions.metrics`, whose variables exist.
    """

    def __init__(self, metrics: Iterable[Any]) -> None:
        self._metrics = list(metrics)
        self._variables = list({id(each): each for metric in self._metrics for each in metric.variables}.values())
        self._places = {id(each): place for place, each in enumerate(self._variables)}
        with tf.init_scope(), tf.device("/device:CPU:0"):
            self._initial = [np.asarray(each) for each in initial_state(self._metrics, self._variables)]
        self._state: _State = list(self._initial)
        self._is_empty = True

    def add(self, state: Sequence[Any]) -> None:
        """Adds the state that a shard has returned."""
        given = [np.asarray(each) for each in state]
        if self._is_empty:
            self._state, self._is_empty = given, False
            return
        added = [_sum(*each) for each in zip(self._state, self._initial, given, strict=True)]
        for metric in self._metrics:
            if hasattr(metric, "merge"):
                merged = metric.merge(self._of(metric, self._state), self._of(metric, given))
                for variable, value in zip(metric.variables, merged, strict=True):
                    added[self._places[id(variable)]] = value
        self._state = added

    def results(self, read: Callable[[], Any]) -> Any:
        """Returns what `read` returns while the metrics have the state of all shards.

        Args:
          read: reads the results of metrics. It is called without Keras' scope of a strategy, on the client.
        """
        with tf.device("/device:CPU:0"), keras.StatelessScope(self._values()):
            return tf.nest.map_structure(lambda value: tf.convert_to_tensor(value).numpy(), read())

    def state(self) -> list[Any]:
        """Returns the state of all shards: a tensor for each of the metrics' variables."""
        return [value for _, value in self._values()]

    def assign(self) -> None:
        """Assigns the state of all shards to the variables of the metrics."""
        for variable, value in self._values():
            variable.assign(value)

    def _values(self) -> list[tuple[Any, Any]]:
        return [
            (variable, tf.constant(np.asarray(value).astype(tf.as_dtype(variable.dtype).as_numpy_dtype)))
            for variable, value in zip(self._variables, self._state, strict=True)
        ]

    def _of(self, metric: Any, state: Sequence[Any]) -> _State:
        return [state[self._places[id(each)]] for each in metric.variables]

    def find_sums(self, first: Sequence[Any], second: Sequence[Any], both: Sequence[Any]) -> tuple[bool, list[str]]:
        """Compares the state after two batches with the sum of what each of them has added.

        Args:
          first: the state after one batch.
          second: that after another one.
          both: that after both, one after the other.

        Returns:
          Whether all metrics are known to be sums, which needs batches that change them; and the names of those that
          are none.
        """
        are_sums, others = True, []
        for metric in self._metrics:
            if hasattr(metric, "merge"):
                continue
            parts = [self._of(metric, each) for each in (self._initial, first, second, both)]
            if not all(map(_is_sum, *parts)):
                others.append(metric.name)
            are_sums &= all(any(map(_differ, parts[0], part)) for part in parts[1:3])
        return are_sums and not others, others


def _sum(state: Any, initial: Any, given: Any) -> Any:
    if initial.dtype.kind in "fV":
        # Once in float64, so that the order of the shards has no effect that could be seen.
        return np.asarray(state, np.float64) + (given.astype(np.float64) - initial.astype(np.float64))
    return state + (given - initial)


def _is_sum(initial: Any, first: Any, second: Any, both: Any) -> bool:
    given = [np.asarray(each) for each in (initial, first, second, both)]
    if given[0].dtype.kind not in "iufV":
        return False
    if given[0].dtype.kind in "iu":
        return bool((given[3] - given[0] == (given[1] - given[0]) + (given[2] - given[0])).all())
    # In units of the least difference, since each batch is rounded.
    tolerance = (
        1000 * float(np.finfo(tf.as_dtype(given[0].dtype).as_numpy_dtype).eps) if given[0].dtype.kind == "f" else 0.1
    )
    start, one, other, all_ = (each.astype(np.float64) for each in given)
    scale = np.maximum(np.abs(one - start), np.abs(other - start))
    with np.errstate(invalid="ignore"):
        close = np.abs((all_ - start) - (one - start) - (other - start)) <= tolerance * (scale + np.abs(start))
    return bool(np.isfinite(start).all() and (close | ~np.isfinite(all_)).all())


def _differ(one: Any, other: Any) -> bool:
    return bool((np.asarray(one) != np.asarray(other)).any())


# Enough that workers of different speed end at about the same time, and that a lost one has little to repeat.
_SHARDS_PER_WORKER = 4
# Of batches of an unknown number.
_BATCHES_PER_SHARD = 16
# What is sent with one call at most, in bytes; a batch may be larger.
_LARGEST = 2**24


class ShardCall(NamedTuple):
    """A call to schedule.

    Attributes:
      function: a `tf.function`.
      args: its arguments.
      batches: how many batches it evaluates, if `Shards.are_counted`.
      worker: the only one that may run it, or None.
    """

    function: Any
    args: tuple[Any, ...]
    batches: int
    worker: int | None = None


class Shards(ABC):
    """Data that is evaluated in shards.

    Attributes:
      are_counted: whether the number of batches of each call is known.
    """

    are_counted = True

    @abstractmethod
    def calls(self, functions: ShardFunctions) -> Iterator[ShardCall]:
        """Yields the call for each shard, in order."""

    @abstractmethod
    def trial(self, functions: ShardFunctions) -> ShardCall | None:
        """Returns a call that tries two batches; None if there are not two."""


def shard_count(shards: int | None, strategy: Any) -> int:
    """Returns the number of shards; while there is no worker, that of one, which may come."""
    return _SHARDS_PER_WORKER * max(1, len(strategy.cluster.workers)) if shards is None else shards


class ClientShards(Shards):
    """Batches that are read on the client and sent along.

    Args:
      batches: nested tensors; parts may be None.
      count: how many there are; None if that is not known.
      shards: how many shards there should be. There are more if many bytes would be sent at once.
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


class RangeShards(Shards):
    """Ranges of a source, which the workers read.

    Args:
      source: of the examples.
      batch_size: the number of examples in a batch.
      shards: how many shards there are at most.
    """

    def __init__(self, source: Source, batch_size: int, shards: int) -> None:
        self._source = source
        self._batch_size = batch_size
        self._width = math.ceil(math.ceil(source.size / batch_size) / shards) * batch_size

    def calls(self, functions: ShardFunctions) -> Iterator[ShardCall]:
        """See `Shards`."""
        for start in range(0, self._source.size, self._width):
            yield self._call(functions, start, self._width)

    def trial(self, functions: ShardFunctions) -> ShardCall | None:
        """See `Shards`."""
        size = self._batch_size
        if self._source.size <= size:
            return None
        ranges = self._range(0, size), self._range(size, size)
        return ShardCall(functions.trial_of_range(self._source), ranges, 2)

    def _call(self, functions: ShardFunctions, start: int, width: int) -> ShardCall:
        positions = self._range(start, width)
        args = positions, np.int64(self._batch_size)
        return ShardCall(functions.of_range(self._source), args, math.ceil(int(positions[2]) / self._batch_size))

    def _range(self, start: int, width: int) -> Any:
        return range_vector(start, min(width, self._source.size - start), start // self._batch_size)


def source_shards(source: Source, batch_size: int, shards: int) -> Shards:
    """Returns the shards of a source, of which there are at most `shards` if the workers read it."""
    if not source.is_on_client:
        return RangeShards(source, batch_size, shards)
    read = source.reader()
    batches = (tf.nest.map_structure(tf.convert_to_tensor, read(each)[1]) for each in ranges_of(source, batch_size))
    return ClientShards(batches, math.ceil(source.size / batch_size), shards)


def ranges_of(source: Source, batch_size: int) -> Iterator[Any]:
    """Yields a range for each batch of a source, in order."""
    for start in range(0, source.size, batch_size):
        yield range_vector(start, min(batch_size, source.size - start), start // batch_size)


class WorkerShards(Shards):
    """The finite data of each worker; a lost worker is waited for, because only it has its data.

    Args:
      dataset: a per-worker dataset.
      workers: the indices of the workers.
    """

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


def _call(functions: ShardFunctions, batches: Sequence[Any]) -> ShardCall:
    """Returns the call for batches of which each may follow the others."""
    size = _size(batches[0])
    if size is None:
        return ShardCall(functions.of_batches, (tuple(batches),), len(batches))
    parts = [[leaf for leaf in tf.nest.flatten(batch) if leaf is not None] for batch in batches]
    joined = [each[0] if len(each) == 1 else tf.concat(each, 0) for each in zip(*parts, strict=True)]
    return ShardCall(functions.of_examples(batches[0]), (joined, np.int64(size)), len(batches))


def _may_follow(group: Sequence[Any], batch: Any, most: int) -> bool:
    """Returns True if a batch can be in one call with those before, which all have the same size."""
    size, last, next_ = _size(group[0]), _size(group[-1]), _size(batch)
    if len(group) >= most or size is None or next_ is None or last != size or not 0 < next_ <= size:
        return False
    if (len(group) + 1) * _bytes(group[0]) > _LARGEST:
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


def _bytes(batch: Any) -> int:
    return sum(
        int(leaf.shape.num_elements()) * max(1, leaf.dtype.size) for leaf in tf.nest.flatten(batch) if leaf is not None
    )
