"""Sources of data. A source has a number of examples, which are read by their positions.

Some sources are arrays in the client's memory, which are copied to each worker. Other sources are data that the client
reads and sends with the functions, such as Parquet files, databases, generators and sequences.
"""

import contextlib
import hashlib
import itertools
import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

_logger = logging.getLogger("coordinator")

# The maximum size of an array, in bytes. An array is sent to a worker in one message.
_LARGEST = 2**30
# The digest covers this many examples of each array.
_SAMPLE = 64
# The interval between reports in the log while examples are counted, in seconds.
_REPORT_INTERVAL = 30.0
# The digest of data that the client reads covers this many examples.
_CLIENT_SAMPLE = 16
# The digest covers this many values of each array in such an example.
_VALUES = 1024
# The maximum size of the client's examples in flight, in bytes.
_MOST_BYTES = 2**28
# The seed of a range whose examples are in order.
IN_ORDER = -1


class Source(ABC):
    """Data with random access.

    Attributes:
      size: the number of examples.
      digest: identifies the data, so that a checkpoint is not resumed with other data.
      mixes_all: whether a shuffled range has examples from anywhere in the data. If false, a range has consecutive
        examples, because single examples take too long to read, and the ranges come in random order.
      is_sequential: whether the data is read in order, and cannot be shuffled.
      is_on_client: whether the client reads the data. `reader` then adds the examples to each range.
      most_out: the maximum number of examples in flight, which the client keeps in memory. None means no limit.
    """

    size: int
    digest: str
    mixes_all: bool
    is_sequential: bool = False
    is_on_client: bool = False
    most_out: int | None = None

    def prepare(self, strategy: Any) -> None:  # noqa: B027 - most sources create nothing
        """Creates the resources that `read` needs on the workers of a strategy. `Epochs.on` calls `prepare`."""

    def reader(self) -> Callable[[Any], Any]:
        """Returns a function that maps each range of a loop to the value that the loop yields."""
        return lambda positions: positions

    def element_spec(self) -> Any:
        """Returns nested `tf.TypeSpec`s of the result of `read`. Must be called in the strategy's scope."""
        read = tf.function(self.read_range, autograph=False)
        outputs = read.get_concrete_function(tf.TensorSpec([5], tf.int64)).structured_outputs
        return tf.nest.map_structure(tf.type_spec_from_value, outputs)

    def read(self, positions: Any) -> Any:
        """Reads the examples of a range. Call `read` in the function that was scheduled with the range.

        Args:
          positions: the item that `Epochs.on` yielded: an int64 vector of epoch, start, count, number and seed, or a
            tuple of such a vector and the examples.

        Returns:
          The examples, stacked along a new first axis.
        """
        return positions[1] if isinstance(positions, tuple) else self.read_range(positions)

    @abstractmethod
    def read_range(self, positions: Any) -> Any:
        """Reads the examples of a range, which is given as a vector."""


def range_vector(
    start: int, count: int, number: int, epoch: int = 0, seed: int = IN_ORDER
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns a range of `count` examples from position `start`, as `Source.read` takes it."""
    return np.array([epoch, start, count, number, seed], np.int64)


def example_indices(positions: Any, size: int) -> Any:
    """Returns the indices of a range's examples in data that is shuffled as a whole, as an int64 vector."""
    epoch, start, count, _, seed = tf.unstack(tf.cast(positions, tf.int64), num=5)
    ordered = start + tf.range(count)
    # Both orders are computed. This costs 60 ns per example, less than a branch between the operations of the graph.
    return tf.where(seed == IN_ORDER, ordered, _shuffled(ordered, tf.stack([seed, epoch]), size))


def shuffled_here(
    indices: np.ndarray[Any, Any], seed: int, epoch: int, size: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the places of indices in an epoch's permutation of `range(size)`, computed on the client."""
    with tf.init_scope(), tf.device("/device:CPU:0"):
        numbers = (tf.constant(value, tf.int64) for value in (indices, [seed, epoch], size))
        places: np.ndarray[Any, np.dtype[np.int64]] = _shuffled(*numbers).numpy()
        return places


def _shuffled(indices: Any, seed: Any, size: Any) -> Any:
    """Returns the places of int64 `indices` in the permutation of `range(size)` for `seed`, int64 [2], as in Grain."""
    return tf.random.experimental.index_shuffle(indices, seed, tf.cast(size, tf.int64) - 1)


def digest_of(parts: Iterable[bytes]) -> str:
    """Returns a short hexadecimal digest."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def without_autotuning(dataset: tf.data.Dataset, options: tf.data.Options | None = None) -> tf.data.Dataset:
    """Returns a dataset without autotuning, so that its iterators are deleted without delay.

    Each iterator has a thread that tunes the dataset's parallelism. The thread sleeps for 10 ms after the first
    attempt, and twice as long after each further attempt, up to a minute. To delete the iterator, TensorFlow wakes the
    thread (by a callback of `CancellationManager::StartCancel`), and only then sets the flag that ends the thread. If
    the thread checks the flag before TensorFlow sets it, the thread sleeps again. The deletion then waits until the
    iterator is about twice as old, for up to a minute. With TensorFlow 2.21 this happened to 5 of 50 iterators on two
    cores, and to nearly all iterators on one core. On a worker, the deletion holds a lock that each other call of the
    client needs, and occupies a thread that answers probes, so the worker seems to be frozen. On the client, the
    deletion holds the GIL. Without autotuning, `num_parallel_calls=tf.data.AUTOTUNE` means the number of threads, 16 at
    most, and a buffer of the size `tf.data.AUTOTUNE` still grows by itself.

    `options` are the options of the dataset. If None, they are read from the dataset, which TensorFlow can do only
    outside of functions. If `autotune.enabled` is already set, the dataset is returned unchanged.
    """
    known = dataset.options() if options is None else options
    if known.autotune.enabled is not None:
        return dataset
    added = tf.data.Options()
    added.autotune.enabled = False
    return dataset.with_options(added)


class ArraysSource(Source):
    """A source with arrays. Scheduled functions read the copy of their worker, other code reads the client's copy.

    `values` are arrays, which must not change afterwards, or functions that return an array on each worker.
    """

    def __init__(self, values: Sequence[np.ndarray[Any, Any] | Callable[[], Any]]) -> None:
        self._values = values
        self._local: list[tf.Tensor] | None = None
        # Maps a strategy to variables. Each array has one variable, which has a copy on each worker.
        self._copies: weakref.WeakKeyDictionary[Any, list[tf.Variable]] = weakref.WeakKeyDictionary()

    def prepare(self, strategy: Any) -> None:
        """Creates variables whose copies each worker gets at its first read. A second call has no effect."""
        if strategy not in self._copies and _has_workers(strategy):
            with strategy.scope():
                self._copies[strategy] = [
                    tf.Variable(value, trainable=False, per_worker_variable=True, name="data") for value in self._values
                ]

    def _arrays(self) -> Sequence[Any]:
        """Returns the arrays for the function that is being traced, as tensors or variables. Call `prepare` before."""
        strategy = tf.distribute.get_strategy()
        if tf.executing_eagerly() or not _has_workers(strategy):
            if self._local is None:
                with tf.init_scope(), tf.device("/device:CPU:0"):
                    self._local = [value() if callable(value) else tf.constant(value) for value in self._values]
            return self._local
        if strategy not in self._copies:
            raise RuntimeError(
                "source.read was traced before the workers could read the source: call epochs.on(strategy) first, and "
                "schedule the function in its loop."
            )
        return self._copies[strategy]


def _has_workers(strategy: Any) -> bool:
    # The class of the strategy is in a layer above, which this module must not import.
    return hasattr(strategy, "parameter_servers")


def arrays(*structure: Any) -> Source:
    """Returns a source of the rows of arrays, which every worker keeps in its memory.

    With `arrays(x, y)`, read the data by `x, y = source.read(positions)`. A single argument may be a dict or another
    structure of arrays. `read` then returns the same structure.

    Args:
      *structure: NumPy arrays, or values that can be converted to arrays, with the same first dimension. The arrays
        must not change afterwards.

    Raises:
      ValueError: there is no array, the numbers of rows differ or are 0, or an array has more than 1 GiB. Write such an
        array to a file, and use `coordinator.data.rows`.
    """
    return _Arrays(structure if len(structure) > 1 else structure[0] if structure else ())


class _Arrays(ArraysSource):
    mixes_all = True

    def __init__(self, structure: Any) -> None:
        self._structure = tf.nest.map_structure(np.asarray, structure)
        values: Sequence[np.ndarray[Any, Any]] = tf.nest.flatten(self._structure)
        if not values:
            raise ValueError("arrays takes at least one array.")
        sizes = [array.shape[0] if array.ndim else 0 for array in values]
        if len(set(sizes)) > 1:
            raise ValueError(f"arrays takes arrays with the same number of rows, got {', '.join(map(str, sizes))}.")
        if not sizes[0]:
            raise ValueError("arrays was given arrays without rows.")
        largest = max(array.nbytes for array in values)
        if largest > _LARGEST:
            raise ValueError(
                f"arrays was given an array of {largest / 2**30:.1f} GiB, which each worker would have to keep in its "
                "memory; at most 1 GiB is allowed. Write it to a file with np.save, and use coordinator.data.rows."
            )
        self.size = sizes[0]
        parts = []
        for array in values:
            sample = np.ascontiguousarray(array[np.linspace(0, len(array) - 1, _SAMPLE).astype(np.int64)])
            content = repr(sample.tolist()).encode() if array.dtype.hasobject else sample.tobytes()
            parts += [f"{array.dtype} {array.shape}".encode(), content]
        self.digest = digest_of(parts)
        super().__init__(values)

    # AutoGraph converts the functions of the program that `read` calls, such as `parse`; its own need no conversion.
    @tf.autograph.experimental.do_not_convert
    def read_range(self, positions: Any) -> Any:
        indices = example_indices(positions, self.size)
        rows = [tf.gather(array, indices) for array in self._arrays()]
        return tf.nest.pack_sequence_as(self._structure, rows)

    def __repr__(self) -> str:
        return f"<coordinator.data.arrays: {self.size} examples>"


def client(data: Any, size: int | None = None) -> Source:
    """Returns a source of data that the client reads in Python, because the workers cannot read it.

    `epochs.on` yields tuples of a range and its examples. Pass the tuple to the function unchanged. In the function,
    `x, y = source.read(positions)` returns the examples, and `positions[0]` is the range.

    Args:
      data: a sequence or an iterable. A sequence has `__len__` and `__getitem__`, and may have `__getitems__`, which
        takes a list of indices, as PyTorch's datasets do. An iterable is an object such as a `tf.data.Dataset`, or a
        function that returns an iterator, such as a generator function. An iterable must give the same examples in the
        same order each time, and cannot be shuffled. If an earlier example is needed again, the iterable is iterated
        from the beginning. An example is an array, or a tuple, list or dict of arrays.
      size: the number of examples in an epoch of an iterable. If None, they are counted by `len` or in a first pass.
        The log reports the count every 30 s, because the iterable may have no end.

    Raises:
      TypeError: `data` can be iterated only once, or not at all.
      ValueError: there are no examples or infinitely many, or `size` was given for a sequence.
    """
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        if size is not None:
            raise ValueError("client takes a size for data that is iterated only; a sequence has its own.")
        return _Sequence(data)
    if isinstance(data, Iterator):
        raise TypeError(
            f"client was given {data!r}, which can be iterated once, so its examples cannot be read again after a "
            "failure. Give it the function that makes it, such as client(lambda: read(path))."
        )
    if not callable(data) and not hasattr(data, "__iter__"):
        raise TypeError(f"client takes a sequence, or what can be iterated, got {data!r}.")
    if size is None and isinstance(data, tf.data.Dataset) and data.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"client was given a dataset without an end, {data!r}. Leave its repeat() out, since Epochs(epochs=...) "
            "reads it again; or give the number of examples of an epoch as size=."
        )
    return _Iterable(data, size)


class _ClientSource(Source):
    """A source whose `read` returns the examples that came with the range."""

    is_on_client = True

    def __init__(self, size: int, sample: list[Any]) -> None:
        if not sample:
            raise ValueError("client was given data without examples.")
        self.size = size
        self.digest = _digest(sample)
        self._spec = tf.nest.map_structure(
            lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), _stacked(sample[:1])
        )
        example = sum(np.asarray(part).nbytes for part in tf.nest.flatten(sample)) / len(sample)
        self.most_out = max(1, int(_MOST_BYTES / max(example, 1)))

    def element_spec(self) -> Any:
        return self._spec

    def read_range(self, positions: Any) -> NoReturn:
        """Raises TypeError, because the examples come with the range."""
        raise TypeError(
            "The data of this source comes with the ranges of epochs.on(strategy): pass source.read what the loop "
            f"gave, a tuple of a range and its examples, got {positions!r}."
        )


class _Sequence(_ClientSource):
    mixes_all = True

    def __init__(self, data: Any) -> None:
        self._data = data
        places = np.linspace(0, len(data) - 1, _CLIENT_SAMPLE).astype(int)
        super().__init__(len(data), self._at(places) if len(data) else [])

    def reader(self) -> Callable[[Any], Any]:
        def with_examples(positions: Any) -> Any:
            epoch, start, count, _, seed = map(int, positions)
            indices = np.arange(start, start + count)
            if seed != IN_ORDER:
                indices = shuffled_here(indices, seed, epoch, self.size)
            return positions, _stacked(self._at(indices))

        return with_examples

    def _at(self, indices: Any) -> list[Any]:
        if hasattr(self._data, "__getitems__"):
            return list(self._data.__getitems__(indices.tolist()))
        return [self._data[index] for index in indices.tolist()]

    def __repr__(self) -> str:
        return f"<coordinator.data.client: {self.size} examples of a {type(self._data).__name__}>"


class _Iterable(_ClientSource):
    mixes_all = False
    is_sequential = True

    def __init__(self, data: Any, size: int | None) -> None:
        repeated = without_autotuning(data) if isinstance(data, tf.data.Dataset) else data
        self._iterate: Callable[[], Any] = repeated if callable(repeated) else repeated.__iter__
        self._name = getattr(data, "__name__", type(data).__name__)
        if size is None:
            # `data` may have no length, or a length that TensorFlow does not know.
            with contextlib.suppress(TypeError):
                size = len(data)
        examples = iter(self._iterate())
        sample = list(itertools.islice(examples, _CLIENT_SAMPLE))
        super().__init__(len(sample) + _count(examples, self._name) if size is None else size, sample)

    def reader(self) -> Callable[[Any], Any]:
        examples: Iterator[Any] = iter(())
        # The epoch and the number of the next example. The epoch -1 makes the first range begin an iteration.
        at_epoch, at = -1, 0

        def read() -> Any:
            nonlocal at
            try:
                example = next(examples)
            except StopIteration:
                raise ValueError(
                    f"The data ended after {at} examples in epoch {at_epoch}; it had {self.size} before, or by "
                    "size=. Epochs need the same examples each time."
                ) from None
            at += 1
            return example

        def with_examples(positions: Any) -> Any:
            nonlocal examples, at_epoch, at
            epoch, start, count, _, _ = map(int, positions)
            if epoch != at_epoch or start < at:
                examples, at_epoch, at = self._begun(), epoch, 0
            while at < start:
                read()
            return positions, _stacked([read() for _ in range(count)])

        return with_examples

    def _begun(self) -> Iterator[Any]:
        """Iterates the data again. Raises ValueError if the first examples differ from the first iteration."""
        examples = iter(self._iterate())
        sample = list(itertools.islice(examples, _CLIENT_SAMPLE))
        if not sample or _digest(sample) != self.digest:
            raise ValueError(
                f"{self!r} gave other examples when it was iterated again. Epochs need the same ones in the same order "
                "each time: without randomness, or with a seed that is set at the beginning of each pass."
            )
        yield from sample
        yield from examples

    def __repr__(self) -> str:
        return f"<coordinator.data.client: {self.size} examples of {self._name}, in order>"


def _count(examples: Iterator[Any], name: str) -> int:
    """Counts the remaining examples. The log reports the count, because the examples may have no end."""
    count, began, reports = 0, time.monotonic(), 1
    for count, _ in enumerate(examples, 1):
        if time.monotonic() - began >= reports * _REPORT_INTERVAL:
            reports += 1
            _logger.warning(
                "coordinator.data.client has counted %d examples of %s in %.0f s, and goes on. If they have no end, or "
                "their number is known, give it: client(..., size=...).",
                count,
                name,
                time.monotonic() - began,
            )
    return count


def _digest(sample: list[Any]) -> str:
    parts = [np.ravel(part)[:_VALUES] for part in tf.nest.flatten(sample)]
    return digest_of(repr(part.tolist()).encode() if part.dtype.hasobject else part.tobytes() for part in parts)


def _stacked(examples: list[Any]) -> Any:
    return tf.nest.map_structure(lambda *parts: _array(parts), *examples)


def _array(parts: Any) -> Any:
    # NumPy's own string type drops NULs at the end of a string, so strings are stacked as objects.
    array = np.stack([np.asarray(part, object if isinstance(part, bytes | str) else None) for part in parts])
    if array.dtype.kind in "USO":
        return tf.constant(array)
    if isinstance(parts[0], float):
        # TensorFlow converts a Python float to float32.
        return array.astype(np.float32)
    return array
