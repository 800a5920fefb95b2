"""Sources of data: a number of examples, which any worker can read by their positions.

Some are arrays in the memory of the client, copied to each worker. Others are data that the client reads and sends with
the functions: Parquet, databases, generators, sequences.
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

# The largest array in bytes: it travels to a worker in one message.
_LARGEST = 2**30
# The digest covers this many examples of each array.
_SAMPLE = 64
# How often the counting of examples is reported, in seconds.
_REPORT_INTERVAL = 30.0
# The digest of data of the client covers this many examples, and this many values of each array of them.
_CLIENT_SAMPLE = 16
_VALUES = 1024
# At most this many bytes are in flight.
_MOST_BYTES = 2**28
# The seed of a range whose examples are in order.
IN_ORDER = -1


class Source(ABC):
    """Data with random access.

    Attributes:
      size: the number of examples.
      digest: identifies the data: a checkpoint is not resumed with other data.
      mixes_all: whether a shuffled range has examples from anywhere in the data. Otherwise single examples take too
        long to read: a range has consecutive ones, and the ranges come in random order.
      is_sequential: whether the data is read in order, and cannot be shuffled.
      is_on_client: whether the client reads the data, so that `reader` adds its examples to each range.
      most_out: the largest number of examples in flight, which the client keeps in memory; None for any number.
    """

    size: int
    digest: str
    mixes_all: bool
    is_sequential: bool = False
    is_on_client: bool = False
    most_out: int | None = None

    def prepare(self, strategy: Any) -> None:  # noqa: B027 - most need nothing
        """Creates what `read` needs on the workers of a strategy. `Epochs.on` calls it."""

    def reader(self) -> Callable[[Any], Any]:
        """Returns a function that turns each range of one loop into what this loop yields."""
        return lambda positions: positions

    def element_spec(self) -> Any:
        """Returns the type of the result of `read`, nested `tf.TypeSpec`s. Called in the strategy's scope."""
        read = tf.function(self.read_range, autograph=False)
        outputs = read.get_concrete_function(tf.TensorSpec([5], tf.int64)).structured_outputs
        return tf.nest.map_structure(tf.type_spec_from_value, outputs)

    def read(self, positions: Any) -> Any:
        """Reads the examples of a range; used in the function that was scheduled with it.

        Args:
          positions: what `Epochs.on` gave: an int64 vector of epoch, start, count, number and seed, or a tuple of it
            and the examples.

        Returns:
          The examples, stacked along a new first axis.
        """
        return positions[1] if isinstance(positions, tuple) else self.read_range(positions)

    @abstractmethod
    def read_range(self, positions: Any) -> Any:
        """Reads the examples of a range, a vector."""


def range_vector(
    start: int, count: int, number: int, epoch: int = 0, seed: int = IN_ORDER
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns a range of `count` examples from position `start`, as `Source.read` takes it."""
    return np.array([epoch, start, count, number, seed], np.int64)


def example_indices(positions: Any, size: int) -> Any:
    """Returns the indices, an int64 vector, of a range's examples in data that is shuffled as a whole."""
    epoch, start, count, _, seed = tf.unstack(tf.cast(positions, tf.int64), num=5)
    ordered = start + tf.range(count)
    # Both are computed: 60 ns per example cost less than a branch, which separates the operations around it.
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
    """Returns the places of int64 indices in the permutation of `range(size)` of a seed, int64 [2], as Grain does."""
    return tf.random.experimental.index_shuffle(indices, seed, tf.cast(size, tf.int64) - 1)


def digest_of(parts: Iterable[bytes]) -> str:
    """Returns a short hexadecimal digest."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def without_autotuning(dataset: tf.data.Dataset, options: tf.data.Options | None = None) -> tf.data.Dataset:
    """Returns a dataset whose iterators are deleted without delay, unless its options ask for autotuning.

    TensorFlow tunes a dataset's parallelism on a thread of each iterator. It sleeps for 10 ms after the first attempt,
    and twice as long after each further one, up to a minute. To delete the iterator TensorFlow wakes the thread (by a
    callback of `CancellationManager::StartCancel`), and only then notes that it must end. A thread that runs in between
    sleeps again, and the deletion waits: until the iterator is about twice as old, for up to a minute. With
    TensorFlow 2.21 this happened to 5 of 50 iterators on two cores, and to nearly all on one. On a worker the deletion
    holds a lock that each other call of the client needs, and one of the threads that answer probes, so the worker
    seems to be frozen. On the client it holds Python's lock.

    A number of parallel calls of `tf.data.AUTOTUNE` is then the number of threads, 16 at most; a buffer of that size
    grows by itself as before. `options` are the dataset's; None reads them, which TensorFlow can do only outside of
    functions.
    """
    known = dataset.options() if options is None else options
    if known.autotune.enabled is not None:
        return dataset
    added = tf.data.Options()
    added.autotune.enabled = False
    return dataset.with_options(added)


class ArraysSource(Source):
    """A source with arrays for scheduled functions, which read their worker's copy; elsewhere the client's own.

    `values` are the arrays, which must not change afterwards, or functions that return them on each worker.
    """

    def __init__(self, values: Sequence[np.ndarray[Any, Any] | Callable[[], Any]]) -> None:
        self._values = values
        self._local: list[tf.Tensor] | None = None
        # By strategy: for each array, a variable with a copy on each worker.
        self._copies: weakref.WeakKeyDictionary[Any, list[tf.Variable]] = weakref.WeakKeyDictionary()

    def prepare(self, strategy: Any) -> None:
        """Gives each worker of a strategy its copies when it first reads them. A second call has no effect."""
        if strategy not in self._copies and _has_workers(strategy):
            with strategy.scope():
                self._copies[strategy] = [
                    tf.Variable(value, trainable=False, per_worker_variable=True, name="data") for value in self._values
                ]

    def _arrays(self) -> Sequence[Any]:
        """Returns the arrays, as tensors or variables, for the function that is being traced, after `prepare`."""
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
    # The class of the strategy is in a layer above.
    return hasattr(strategy, "parameter_servers")


def arrays(*structure: Any) -> Source:
    """Returns a source of the rows of arrays, which every worker keeps in its memory.

    `x, y = source.read(positions)` for `arrays(x, y)`; for one argument, which may be a dict or another structure of
    arrays, `read` returns that structure.

    Args:
      *structure: NumPy arrays, or what can be converted to them, with the same first dimension. They must not change
        afterwards.

    Raises:
      ValueError: there is no array, the numbers of rows differ or are 0, or an array has more than 1 GiB: write it to a
        file, and use `coordinator.data.rows`.
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

    def read_range(self, positions: Any) -> Any:
        indices = example_indices(positions, self.size)
        rows = [tf.gather(array, indices) for array in self._arrays()]
        return tf.nest.pack_sequence_as(self._structure, rows)

    def __repr__(self) -> str:
        return f"<coordinator.data.arrays: {self.size} examples>"


def client(data: Any, size: int | None = None) -> Source:
    """Returns a source of data that the client reads in Python because servers cannot.

    `epochs.on` gives a tuple of the range and its examples; pass it to the function unchanged. There,
    `x, y = source.read(positions)` returns the examples, and `positions[0]` is the range.

    Args:
      data: a sequence, with `__len__` and `__getitem__` (and perhaps `__getitems__`, which takes a list of indices, as
        PyTorch's datasets have), or an iterable that gives the same examples in the same order each time: an object
        such as a `tf.data.Dataset`, or a function that returns an iterator, such as a generator function. An iterable
        is read in order: it cannot be shuffled, and it is iterated from the beginning when an earlier example is needed
        again. An example is an array, or a tuple, list or dict of arrays.
      size: the number of examples in an epoch of an iterable; None counts them, by `len` or in a first pass. The log
        reports the count every 30 s, since data may have no end.

    Raises:
      TypeError: `data` can be iterated only once, or not at all.
      ValueError: there are no examples, or infinitely many; or `size` was given for a sequence.
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
        """Raises TypeError: the examples come with the range."""
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
            # It may have no length, or one that TensorFlow does not know.
            with contextlib.suppress(TypeError):
                size = len(data)
        examples = iter(self._iterate())
        sample = list(itertools.islice(examples, _CLIENT_SAMPLE))
        super().__init__(len(sample) + _count(examples, self._name) if size is None else size, sample)

    def reader(self) -> Callable[[Any], Any]:
        examples: Iterator[Any] = iter(())
        # The epoch and the number of the next example. Epoch -1, so that the first range begins one.
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
        """Begins again; raises ValueError if the first examples differ from the first time."""
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
    """Counts the remaining examples, with reports in the log, since they may have no end."""
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
    # NumPy's own type of strings drops NULs at the end.
    array = np.stack([np.asarray(part, object if isinstance(part, bytes | str) else None) for part in parts])
    if array.dtype.kind in "USO":
        return tf.constant(array)
    if isinstance(parts[0], float):
        # TensorFlow's dtype for a Python number.
        return array.astype(np.float32)
    return array
