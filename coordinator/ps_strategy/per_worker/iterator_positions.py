"""Where the iterators of the workers are: how many elements they have left, and positions that are saved and restored.

    save      serialize --> each worker that is not lost: SerializeIterator --> the string in the checkpoint
    restore   the string in the checkpoint --> deserialize: kept here --> a new iterator on each worker begins there

Guarantees:
- A position is that between two calls on its worker. So positions that are saved while no scheduled function runs are
  those of the model.
- An iterator that is created again, because its worker was lost, begins at the last saved or restored position; at the
  beginning if its data was being cached in a file, which the log says.
- A string is restored as a whole or not at all: a `ValueError` says what differs.
"""

import base64
import json
import logging
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import tensorflow as tf

from coordinator.ps_strategy.per_worker.cache_files import is_cache_begun
from coordinator.ps_strategy.per_worker.resource import WorkerContext
from coordinator.ps_strategy.tensorflow_internals.calls import call_concrete

_logger = logging.getLogger("coordinator")

_VERSION = 1
# TensorFlow's number for: what a pipeline keeps outside of the iterator, such as a lookup table, is not saved.
_WITHOUT_EXTERNAL_STATE = 1

_HANDLE = tf.TensorSpec([], tf.resource)


class _Position(NamedTuple):
    """The position of one worker's iterator.

    Attributes:
      taken: how many elements were taken before, at most; infinite if that is not known.
      state: what TensorFlow serializes of the iterator.
    """

    taken: float
    state: bytes


class IteratorPositions:
    """The positions of the iterators that one per-worker iterator has on the workers.

    The entry of a worker is used by its thread alone, except that positions are restored while nothing runs.

    Args:
      workers: returns the number of shares into which the data is divided.
      element_spec: the type of the elements.
    """

    def __init__(self, workers: Callable[[], int], element_spec: Any) -> None:
        self._workers = workers
        self._element_spec = repr(element_spec)
        self._sizes: dict[int, float] = {}
        self._taken: dict[int, float] = {}
        self._saved: dict[int, _Position] = {}
        # Of the iterators that exist: a position in another share means nothing.
        self._shares: dict[int, Hashable] = {}

    def iterator_of(self, dataset: tf.data.Dataset, context: WorkerContext, share: Hashable = None) -> Any:
        """Returns a new iterator on a worker, at the last saved or restored position of the share if there is one."""
        if self._shares.setdefault(context.index, share) != share:
            self._shares[context.index] = share
            self._saved.pop(context.index, None)
        size = int(dataset.cardinality())
        self._sizes[context.index] = math.inf if size == tf.data.INFINITE_CARDINALITY else max(size, 0)
        self._taken[context.index] = 0
        iterator = iter(dataset)
        if is_cache_begun(dataset) and self._saved.pop(context.index, None) is not None:
            _logger.warning(
                "The iterator on %s begins at the beginning of its data: its position cannot be continued, because the "
                "file in which the dataset is cached was not complete.",
                context.device,
            )
        position = self._saved.get(context.index)
        if position is not None:
            concrete = _restore.get_concrete_function()
            call_concrete(concrete, [_handle_of(iterator), tf.constant(position.state)], context.cancellation)
            self._taken[context.index] = position.taken
        return iterator

    def has_saved(self, worker: int) -> bool:
        """Returns whether a new iterator of a worker begins at a position that was saved or restored."""
        return worker in self._saved

    def is_endless_on(self, worker: int) -> bool:
        """Returns True if the worker's iterator has been created and is known to be endless."""
        return self._sizes.get(worker) == math.inf

    def left_on(self, worker: int) -> float:
        """Returns how many elements a worker's iterator, which is not endless, has left at least."""
        return max(self._sizes.get(worker, 0) - self._taken.get(worker, 0), 0)

    def count_on(self, worker: int, taken: float) -> None:
        """Counts elements that are taken, at most, from a worker's iterator."""
        self._taken[worker] += taken

    def save_on(self, iterator: Any, context: WorkerContext) -> None:
        """Saves the position of a worker's iterator, on the worker's thread."""
        with tf.device(context.device):
            state = call_concrete(_save.get_concrete_function(), [_handle_of(iterator)], context.cancellation).numpy()
        self._saved[context.index] = _Position(self._taken[context.index], state)

    def to_json(self) -> str:
        """Returns the saved positions."""
        positions = {
            worker: {"taken": position.taken, "state": base64.b64encode(position.state).decode()}
            for worker, position in sorted(self._saved.items())
        }
        own = {"version": _VERSION, "workers": self._workers(), "elements": self._element_spec}
        return json.dumps(own | {"positions": positions})

    def from_json(self, text: Any, name: str) -> None:
        """Replaces the saved positions by those that `to_json` has returned.

        Raises:
          ValueError: they are of another number of workers, of other elements, or of another format.
        """
        saved = json.loads(text if isinstance(text, str) else bytes(text))
        if saved.get("version") != _VERSION:
            raise ValueError(
                f"The checkpoint has positions of format {saved.get('version')} of the {name}, and this release of "
                f"coordinator reads format {_VERSION}: use the release that wrote it."
            )
        if saved["workers"] != self._workers():
            raise ValueError(
                f"The checkpoint has positions of the {name} on {saved['workers']} workers, and this program began "
                f"with {self._workers()}, among which its data is divided. Start with {saved['workers']} workers, or "
                "leave the iterator out of the tf.train.Checkpoint to begin with the first element. "
                "coordinator.data.Epochs continues on any number of workers."
            )
        if saved["elements"] != self._element_spec:
            raise ValueError(
                f"The checkpoint has positions of the {name} in other data: its elements were {saved['elements']}, and "
                f"are {self._element_spec} now. Continue with the data of then, or leave the iterator out of the "
                "tf.train.Checkpoint to begin with the first element."
            )
        self._saved = {
            int(worker): _Position(position["taken"], base64.b64decode(position["state"]))
            for worker, position in saved["positions"].items()
        }


@tf.function(input_signature=[_HANDLE])
def _save(handle: Any) -> Any:
    state = tf.raw_ops.SerializeIterator(resource_handle=handle, external_state_policy=_WITHOUT_EXTERNAL_STATE)
    return tf.io.serialize_tensor(state)


@tf.function(input_signature=[_HANDLE, tf.TensorSpec([], tf.string)])
def _restore(handle: Any, state: Any) -> None:
    tf.raw_ops.DeserializeIterator(resource_handle=handle, serialized=tf.io.parse_tensor(state, tf.variant))


def _handle_of(iterator: Any) -> Any:
    [handle] = tf.nest.flatten(iterator, expand_composites=True)
    return handle
