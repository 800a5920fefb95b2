"""A lock on one server, for the graphs of all workers."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf


@contextlib.contextmanager
def built() -> Iterator[list[Any]]:
    """A scope that gives a list in which, at its end, all operations are that were built in it."""
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    operations: list[Any] = []
    yield operations
    operations += graph.get_operations()[before:]


class Exclusive:
    """What is built while it is held runs in one graph at a time.

    It is a mutex of TensorFlow's on the server, found by its name whenever it is needed, so that a restarted server
    has it too. A call that is cancelled, as those of a dead worker are, lets go of it. Everything that runs while it
    is held should be on its own server: a lock that waits for another machine would be held by one that hangs.

    Args:
      name: the same for all who share the lock. A new client may use the names of one that died.
      device: the server's CPU.
    """

    def __init__(self, name: str, device: str) -> None:
        self._name = name
        self.device = device

    @contextlib.contextmanager
    def hold(self, after: Sequence[Any] = ()) -> Iterator[None]:
        """A scope whose operations run under the lock, on its server unless they say otherwise.

        Args:
          after: tensors and operations; the lock is taken once they are there.
        """
        with tf.device(self.device):
            # What is given to a function cannot be waited for as it is: it may not be there when the function begins.
            awaited = [tf.identity(each) if tf.is_tensor(each) else each for each in after]
            with tf.control_dependencies(awaited):
                lock = tf.raw_ops.MutexLock(mutex=tf.raw_ops.MutexV2(shared_name=self._name))
            with built() as operations, tf.control_dependencies([lock]):
                yield
            with tf.control_dependencies(operations):
                tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
