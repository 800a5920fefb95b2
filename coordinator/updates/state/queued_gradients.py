"""The checkpoint of the gradients that are queued on the parameter servers.

It promises that the restored queue is the saved one, in its order and with its delays, on any number of servers. Rows
are transferred one by one; the client holds all of them at once, in one string.
"""

import io
from collections.abc import Sequence

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
        self._pushes = pushes
        self._stores = stores

    def serialize(self) -> bytes:
        """Returns the queue as a string.

        Raises:
          tf.errors.OpError: a parameter server does not answer.
        """
        entries, rows = [], []
        for entry in self._pushes.entries().numpy():
            row = [b""] * self._width
            for store in self._stores:
                strings = store.serialized(entry[:PUSH_ID_SIZE]).numpy()
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
        for store in self._stores:
            store.clear()
        ends = np.cumsum(sizes).reshape(sizes.shape)
        for push, row_ends, row_sizes in zip(ids, ends, sizes, strict=True):
            row = [strings[end - size : end] for end, size in zip(row_ends, row_sizes, strict=True)]
            for store in self._stores:
                store.add_serialized(push, [row[place] for place in store.columns.places])
        self._pushes.replace(np.concatenate([ids, entries], 1))

    @property
    def _width(self) -> int:
        return self._stores[0].columns.width
