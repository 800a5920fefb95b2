"""Gradients that a server keeps until an optimizer with `gradient_accumulation_steps` takes them."""

import functools
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from coordinator.embeddings.shard_storage import ShardStorage


class AccumulatedGradient:
    """Gradients of a table, which an optimizer takes after some steps. They are in no checkpoint.

    Args:
      storages: of the table, by parameter server.
      divided: returns the keys that each server has, and their places among all.
      shape: of the table.
    """

    def __init__(self, storages: Sequence[ShardStorage], divided: Callable[[Any], Any], shape: Sequence[int]) -> None:
        self._parts = [AccumulatedRows(storage) for storage in storages]
        self._divided = divided
        self._shape = list(shape)

    def add(self, gradient: tf.IndexedSlices) -> None:
        """Keeps a gradient, whose indices are keys."""
        keys, places = self._divided(gradient.indices)
        for part, mine, place in zip(self._parts, keys, places, strict=True):
            part.add(mine, tf.gather(gradient.values, place))

    def take(self) -> tf.IndexedSlices:
        """Returns the sum of all gradients since the last call, in which keys may occur several times."""
        keys, rows = zip(*[part.take() for part in self._parts], strict=True)
        return tf.IndexedSlices(tf.concat(rows, 0), tf.concat(keys, 0), tf.constant(self._shape, tf.int64))

    def discard(self) -> None:
        """Forgets all gradients since the last `take`; called on the client."""
        for part in self._parts:
            part.take()


class AccumulatedRows:
    """The rows of gradients of one shard, with their keys, one after the other, on its server.

    They are in resources that are looked up by name at each use, as the mutex is, so that they exist, empty, on a
    restarted server too. A `tf.Variable` must have a known shape: a worker that is given a handle of another one dies
    (`Check failed` in `RemoteMgr::DeserializeRemoteTensorHandle`, TensorFlow 2.21).

    Args:
      storage: of the shard; its mutex is held for every change.
    """

    def __init__(self, storage: ShardStorage) -> None:
        self._storage = storage
        # Other than those of any other client of the server.
        self._name = f"coordinator/embeddings/{uuid.uuid4().hex}"
        keys, rows = tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, storage.dim], tf.float32)
        self._specs = {"keys": keys, "rows": rows}
        self._add = tf.function(self._append, input_signature=[keys, rows], autograph=False)
        self._take_all = tf.function(self._take, input_signature=[], autograph=False)

    def add(self, keys: Any, gradient: Any) -> None:
        """Keeps the rows of a gradient."""
        with tf.device(self._storage.device):
            self._add(keys, gradient)

    def take(self) -> tuple[Any, Any]:
        """Returns all keys, which may occur several times, and their rows; nothing is kept."""
        with tf.device(self._storage.device):
            keys, rows = self._take_all()
        return keys, rows

    def _append(self, keys: Any, gradient: Any) -> Any:
        with self._storage.mutex.hold([keys, gradient]):
            for handle, kept, added in zip(*self._read(), (keys, gradient), strict=True):
                tf.raw_ops.AssignVariableOp(resource=handle, value=tf.concat([kept, added], 0))
        return tf.constant(0)

    def _take(self) -> tuple[Any, Any]:
        with self._storage.mutex.hold():
            handles, (keys, rows) = self._read()
            with tf.control_dependencies([keys, rows]):
                for handle, kept in zip(handles, (keys, rows), strict=True):
                    tf.raw_ops.AssignVariableOp(resource=handle, value=kept[:0])
        return keys, rows

    def _read(self) -> tuple[list[Any], list[Any]]:
        """Returns the handles of the keys and rows, and their values."""
        handles, values = [], []
        for name, spec in self._specs.items():
            unknown = tf.TensorShape(None)
            handle = tf.raw_ops.VarHandleOp(dtype=spec.dtype, shape=unknown, shared_name=f"{self._name}/{name}")
            value = tf.cond(
                tf.raw_ops.VarIsInitializedOp(resource=handle),
                functools.partial(tf.raw_ops.ReadVariableOp, resource=handle, dtype=spec.dtype),
                functools.partial(tf.zeros, [0, *spec.shape[1:]], spec.dtype),
            )
            handles.append(handle)
            values.append(tf.ensure_shape(value, spec.shape))
        return handles, values
