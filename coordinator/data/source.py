"""The base of sources of data: a number of examples, which any worker can read by their positions."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

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
