"""Sources of data: a number of examples, which any worker can read by their positions.

Some are arrays in the memory of the client, copied to each worker.
"""

import hashlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# The largest array in bytes: it travels to a worker in one message.
_LARGEST = 2**30
# The digest covers this many examples of each array.
_SAMPLE = 64
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
        self.digest = digest_of(_described(values))
        super().__init__(values)

    def read_range(self, positions: Any) -> Any:
        """See `Source.read_range`."""
        indices = example_indices(positions, self.size)
        rows = [tf.gather(array, indices) for array in self._arrays()]
        return tf.nest.pack_sequence_as(self._structure, rows)

    def __repr__(self) -> str:
        return f"<coordinator.data.arrays: {self.size} examples>"


def _described(values: Sequence[np.ndarray[Any, Any]]) -> Iterator[bytes]:
    for array in values:
        yield f"{array.dtype} {array.shape}".encode()
        sample = array[np.linspace(0, len(array) - 1, _SAMPLE).astype(np.int64)]
        yield repr(sample.tolist()).encode() if array.dtype.hasobject else np.ascontiguousarray(sample).tobytes()
