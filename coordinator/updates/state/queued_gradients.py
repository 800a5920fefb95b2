"""The checkpoint of the gradients that are queued on the parameter servers.

It promises that the restored queue is the saved one, in its order and with its delays, on any number of servers. Rows
are transferred one by one; the client holds all of them at once, in one string.
"""

import io
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.updates.state.gradient_store import PUSH_ID_SIZE, GradientStore
from coordinator.updates.state.push_log import ENTRY_SIZE, DelayedPushes

# The worker in the ids of restored pushes. A new client numbers its connections from 1 again, so the numbers in a
# checkpoint cannot be compared with those of the workers' later pushes.
_RESTORED = -1


class QueuedGradients(tf.train.experimental.PythonState):
    """Saves and restores the queue. Used while no scheduled function runs.

    A gradient that some servers apply while it is being saved is left out.

    Args:
      pushes: the log of the queued pushes.
      stores: on all servers; their columns have kinds.
    """

    def __init__(self, pushes: DelayedPushes, stores: Sequence[GradientStore]) -> None:
        self._stores = stores
        self.entries = _client_function(pushes.entries)
        self._replace = _client_function(pushes.replace, tf.TensorSpec([None, ENTRY_SIZE], tf.int64))
        push = tf.TensorSpec([PUSH_ID_SIZE], tf.int64)
        self._read = [_client_function(partial(_read, store), push) for store in stores]
        self._add = [
            _client_function(partial(_add, store), push, tf.TensorSpec([len(store.columns.dtypes)], tf.string))
            for store in stores
        ]
        self._clear = [_client_function(store.clear) for store in stores]

    def serialize(self) -> bytes:
        """Returns the queue as a string.

        Raises:
          tf.errors.OpError: a parameter server does not answer.
        """
        entries, rows = [], []
        for entry in self.entries().numpy():
            row = [b""] * self._width
            for store, read in zip(self._stores, self._read, strict=True):
                strings = read(entry[:PUSH_ID_SIZE]).numpy()
                if not len(strings):
                    break
                for place, string in zip(store.columns.places, strings, strict=True):
                    row[place] = string
            else:
                entries.append(entry[PUSH_ID_SIZE:])
                rows.append(row)
        buffer = io.BytesIO()
        np.savez(
            buffer,
            entries=np.array(entries, np.int64).reshape(len(rows), ENTRY_SIZE - PUSH_ID_SIZE),
            sizes=np.array([[len(string) for string in row] for row in rows], np.int64).reshape(-1, self._width),
            strings=np.frombuffer(b"".join(string for row in rows for string in row), np.uint8),
        )
        return buffer.getvalue()

    def deserialize(self, string_value: bytes) -> None:
        """Replaces the queue.

        Raises:
          ValueError: the string was saved by a rule for other variables, or with another kind of optimizer.
          tf.errors.OpError: a parameter server does not answer.
        """
        saved = np.load(io.BytesIO(string_value), allow_pickle=False)
        entries, sizes, strings = saved["entries"], saved["sizes"], saved["strings"].tobytes()
        if sizes.shape[1] != self._width:
            raise ValueError(
                f"The checkpoint has queued gradients of {sizes.shape[1]} columns, and this rule's have {self._width}: "
                "it was saved by a rule for other variables, or with another kind of optimizer."
            )
        ids = np.zeros([len(entries), PUSH_ID_SIZE], np.int64)
        ids[:, 0], ids[:, -1] = _RESTORED, np.arange(len(entries))
        for clear in self._clear:
            clear()
        ends = np.cumsum(sizes).reshape(sizes.shape)
        for push, row_ends, row_sizes in zip(ids, ends, sizes, strict=True):
            row = [strings[end - size : end] for end, size in zip(row_ends, row_sizes, strict=True)]
            for store, add in zip(self._stores, self._add, strict=True):
                add(push, [row[place] for place in store.columns.places])
        self._replace(np.concatenate([ids, entries], 1))

    @property
    def _width(self) -> int:
        return self._stores[0].columns.width


def _client_function(function: Any, *arguments: tf.TensorSpec) -> Any:
    """Wraps a function for calls from the client; it returns None if `function` returns an operation."""

    def call(*arguments: Any) -> Any:
        result = function(*arguments)
        return result if tf.is_tensor(result) else None

    return tf.function(call, input_signature=arguments, autograph=False)


def _read(store: GradientStore, push: Any) -> Any:
    with tf.device(store.device):
        return store.serialized(tf.identity(push))


def _add(store: GradientStore, push: Any, strings: Any) -> Any:
    with tf.device(store.device):
        push, strings = tf.identity(push), tf.identity(strings)
        dtypes = store.columns.dtypes
        row = {column: tf.io.parse_tensor(strings[column], dtype) for column, dtype in enumerate(dtypes)}
        return store.add(push, row)
