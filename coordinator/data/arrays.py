"""Arrays in the memory of the client, copied to each worker."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.data.source import Source, digest_of, example_indices

# The largest array in bytes: it travels to a worker in one message.
_LARGEST = 2**30
# The digest covers this many examples of each array.
_SAMPLE = 64


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
