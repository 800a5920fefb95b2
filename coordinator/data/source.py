"""What a source of data is: a number of examples, each of which any worker can read by its position."""

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
      digest: identifies the data, so that a checkpoint is not resumed with other data.
      mixes_all: whether a shuffled range has examples from anywhere in the data; otherwise it has consecutive ones,
        because reading single examples takes too long, and the ranges come in random order.
      is_sequential: whether the data is read in order, and cannot be shuffled.
      is_on_client: whether the client reads the data: each range of a loop comes with its examples, as `reader` says.
      most_out: how many examples may be in flight at once, since the client keeps them; None for any number.
    """

    size: int
    digest: str
    mixes_all: bool
    is_sequential: bool = False
    is_on_client: bool = False
    most_out: int | None = None

    def prepare(self, strategy: Any) -> None:  # noqa: B027 - most need nothing
        """Creates what `read` needs on the workers of a strategy; `Epochs.on` calls it."""

    def reader(self) -> Callable[[Any], Any]:
        """Returns a function that turns each range of one loop into what this loop yields."""
        return lambda positions: positions

    def element_spec(self) -> Any:
        """Returns the type of what `read` returns, as nested `tf.TypeSpec`s; in the scope of the strategy."""
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
        """Reads the examples of a range, which is a vector."""


def range_vector(
    start: int, count: int, number: int, epoch: int = 0, seed: int = IN_ORDER
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns a range of `count` examples from position `start` on, as `Source.read` takes it."""
    return np.array([epoch, start, count, number, seed], np.int64)


def example_indices(positions: Any, size: int) -> Any:
    """Returns the indices, an int64 vector, of the examples of a range in data that is shuffled as a whole."""
    epoch, start, count, _, seed = tf.unstack(tf.cast(positions, tf.int64), num=5)
    ordered = start + tf.range(count)
    # Both are computed: 60 ns for an example cost less than a branch, which separates the operations around it.
    return tf.where(seed == IN_ORDER, ordered, _shuffled(ordered, tf.stack([seed, epoch]), size))


def shuffled_here(
    indices: np.ndarray[Any, Any], seed: int, epoch: int, size: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the places of some indices in the permutation of `range(size)` for an epoch, computed on the client."""
    with tf.init_scope(), tf.device("/device:CPU:0"):
        numbers = (tf.constant(value, tf.int64) for value in (indices, [seed, epoch], size))
        places: np.ndarray[Any, np.dtype[np.int64]] = _shuffled(*numbers).numpy()
        return places


def _shuffled(indices: Any, seed: Any, size: Any) -> Any:
    """Returns the places of some indices in a permutation of `range(size)`; all are int64, the seed of two numbers.

    The permutation is computed where it is needed, and depends only on the seed. (Grain does the same.)
    """
    return tf.random.experimental.index_shuffle(indices, seed, tf.cast(size, tf.int64) - 1)


def digest_of(parts: Iterable[bytes]) -> str:
    """Returns a short digest of some bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def without_autotuning(dataset: tf.data.Dataset, options: tf.data.Options | None = None) -> tf.data.Dataset:
    """Returns a dataset whose iterators are deleted without delay, unless its options ask for autotuning.

    TensorFlow tunes a dataset's parallelism on a thread of each iterator, which sleeps for 10 ms after the first
    attempt, and twice as long after each further one, up to a minute. To delete the iterator TensorFlow wakes that
    thread (by a callback of `CancellationManager::StartCancel`), and only then notes that it must end. If the thread
    runs in between, it sleeps on, and the deletion waits for it: until the iterator is about twice as old, for up to a
    minute. With TensorFlow 2.21 that happened to 5 of 50 iterators on two cores, and to nearly all on one. On a worker
    the deletion holds a lock that each other call of the client needs, and one of the threads that answer probes: the
    worker seems to be frozen. On the client it holds Python's lock.

    `tf.data.AUTOTUNE` as a number of parallel calls is then the number of threads, 16 at most; as the size of a buffer
    it grows by itself as before.

    `options` are the dataset's; None reads them, which TensorFlow can do only outside of functions.
    """
    known = dataset.options() if options is None else options
    if known.autotune.enabled is not None:
        return dataset
    added = tf.data.Options()
    added.autotune.enabled = False
    return dataset.with_options(added)
