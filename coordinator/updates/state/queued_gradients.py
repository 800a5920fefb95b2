"""The gradients that are queued on the parameter servers, as a checkpoint has them.

It promises that what is restored is what was saved, in its order, with its delays, also on other servers than it was
saved from. Each row travels by itself; the client holds all of them at once, in one string.
"""

import io
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.updates.delayed_pushes import ENTRY_SIZE, DelayedPushes
from coordinator.updates.gradient_store import PUSH_ID_SIZE

# Stands for the worker of a gradient that came from a checkpoint: a new client numbers its connections anew, and what
# is known by an old number must not be taken for older, or newer, than what the same worker pushes now.
_RESTORED = -1


class QueuedGradients(tf.train.experimental.PythonState):
    """Reads and replaces what is queued. To be used while nothing that is scheduled runs.

    A gradient that some servers have applied already while it is being saved is left out.

    Args:
      pushes: what is known of each.
      servers: each with its `store` and its `columns`.
    """

    def __init__(self, pushes: DelayedPushes, servers: Sequence[Any]) -> None:
        self._servers = servers
        self._entries = _client_function(pushes.entries)
        self._replace = _client_function(pushes.replace, tf.TensorSpec([None, ENTRY_SIZE], tf.int64))
        push = tf.TensorSpec([PUSH_ID_SIZE], tf.int64)
        self._read = [_client_function(partial(_read, server), push) for server in servers]
        self._add = [
            _client_function(partial(_add, server), push, tf.TensorSpec([len(server.columns.dtypes)], tf.string))
            for server in servers
        ]
        self._clear = [_client_function(server.store.clear) for server in servers]

    def serialize(self) -> bytes:
        """What is queued, as a string.

        Raises:
          tf.errors.OpError: a parameter server does not answer.
        """
        entries, rows = [], []
        for entry in self._entries().numpy():
            row = [b""] * self._width
            for server, read in zip(self._servers, self._read, strict=True):
                strings = read(entry[:PUSH_ID_SIZE]).numpy()
                if not len(strings):
                    break
                for place, string in zip(server.columns.places, strings, strict=True):
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
        """Replaces what is queued.

        Raises:
          ValueError: it was saved by a rule for other variables, or with another kind of optimizer.
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
            for server, add in zip(self._servers, self._add, strict=True):
                add(push, [row[place] for place in server.columns.places])
        self._replace(np.concatenate([ids, entries], 1))

    @property
    def _width(self) -> int:
        return int(self._servers[0].columns.width)

    def __repr__(self) -> str:
        return f"<QueuedGradients on {len(self._servers)} servers>"


def _client_function(function: Any, *arguments: tf.TensorSpec) -> Any:
    """A function for the client to call; gives what `function` does, None if that is an operation."""

    def call(*arguments: Any) -> Any:
        result = function(*arguments)
        return result if tf.is_tensor(result) else None

    return tf.function(call, input_signature=arguments, autograph=False)


def _read(server: Any, push: Any) -> Any:
    with tf.device(server.store.device):
        return server.store.serialized(tf.identity(push))


def _add(server: Any, push: Any, strings: Any) -> Any:
    with tf.device(server.store.device):
        push, strings = tf.identity(push), tf.identity(strings)
        dtypes = server.columns.dtypes
        row = {column: tf.io.parse_tensor(strings[column], dtype) for column, dtype in enumerate(dtypes)}
        return server.store.add(push, row)
