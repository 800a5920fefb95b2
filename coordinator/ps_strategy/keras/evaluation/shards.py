"""The shards of the data of an evaluation, as calls of `ShardFunctions`."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from coordinator.data.source import Source, range_vector
from coordinator.ps_strategy.keras.evaluation.shard_functions import ShardFunctions
from coordinator.ps_strategy.per_worker.dataset import PerWorkerDataset

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
