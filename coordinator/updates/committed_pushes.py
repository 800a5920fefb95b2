"""Which pushed gradients make the next updates: the one place where that is decided, for all servers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from coordinator.updates import decisions
from coordinator.updates.gradient_store import PUSH_ID_SIZE, push_ids
from coordinator.updates.state.rule_state import NOT_UNDER_WAY, Ledger
from coordinator.updates.vector_list import new_vector_list, vector_list


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A push on which is to be decided; int64 scalars.

    Attributes:
      worker: its index.
      pulled_version: the version that the gradient was computed on.
      version: the version now.
      waiting: how many gradients wait for an update.
    """

    worker: Any
    pulled_version: Any
    version: Any
    waiting: Any


class CommittedPushes:
    """The ids of the pushes that were accepted and are in no update yet, in the order in which they came.

    To be made in the strategy's scope. Not in checkpoints. The first of them, `grads_to_wait` at most, are the next
    update. All of them are given to the servers then, so that these drop none that is meant for a later one.

    Args:
      ledger: where updates, pushes and what was rejected are counted.
      grads_to_wait: gradients per update.
      is_accepted: decides about an arrival, on the home server and under the ledger's lock; returns a bool scalar.
    """

    def __init__(self, ledger: Ledger, grads_to_wait: int, is_accepted: Callable[[Arrival], Any]) -> None:
        self._ledger = ledger
        self._grads_to_wait = grads_to_wait
        self._is_accepted = is_accepted
        with tf.distribute.get_strategy().extended.colocate_vars_with(ledger.version):
            self._pushes = new_vector_list(PUSH_ID_SIZE)

    def waiting(self) -> Any:
        """How many gradients wait for an update, an int64 scalar; to be called under the ledger's lock."""
        return tf.cast(tf.raw_ops.TensorListLength(input_handle=self._pushes.read_value()), tf.int64)

    def commit(self, push: Any, pulled_version: Any, size: Any) -> tuple[Any, Any]:
        """Decides about a push that is on all servers, and counts it.

        Args:
          push: its id, int64 [3]; on the home server, as all else.
          pulled_version: the version that the gradient was computed on.
          size: of all that was sent, in bytes.

        Returns:
          Whether it is accepted, a bool scalar, and, if an update is to be made now, the ids: int64 [n, 3], else n = 0.
        """
        ledger, present = self._ledger, self._ledger.present
        with ledger.lock.hold([push, pulled_version, size]):
            worker, connection, _ = tf.unstack(push)
            version, waiting = ledger.version.read_value(), self.waiting()
            # A call that was given up, on a connection that is no more, must not count as the worker's own.
            is_own = connection >= present.fence.sparse_read(worker)
            accepted = is_own & self._is_accepted(Arrival(worker, pulled_version, version, waiting))
            present.fence.scatter_nd_max([[worker]], [connection])
            under_way = tf.where(
                is_own, tf.constant(NOT_UNDER_WAY, tf.int64), present.pulled_version.sparse_read(worker)
            )
            present.pulled_version.scatter_nd_update([[worker]], [under_way])
            pushes = tf.concat([push_ids(self._pushes.read_value()), push[None][: tf.cast(accepted, tf.int32)]], 0)
            self._pushes.assign(vector_list(pushes), read_value=False)
            counted = tf.cast(accepted, tf.int64)
            # Those that wait are applied before it.
            staleness = decisions.staleness(version + waiting // self._grads_to_wait, pulled_version)
            ledger.note_step(worker, counted)
            seen = {"staleness": staleness, "worker": worker, "steps": counted}
            ledger.count(pushes=1, rejected=1 - counted, bytes_pushed=size, **seen)
            return accepted, self._complete(pushes, self._grads_to_wait)

    def complete(self, least: Any) -> Any:
        """The ids, int64 [n, 3]; none if there are fewer than `least`."""
        with self._ledger.lock.hold():
            return self._complete(push_ids(self._pushes.read_value()), least)

    def close(self, committed: Any, least: Any) -> Any:
        """Counts an update that all servers have made, unless that was done, and returns what is left as `complete`.

        Args:
          committed: what the servers were given, int64 [n, 3], n > 0.
          least: as for `complete`.
        """
        ledger = self._ledger
        with tf.device(ledger.home):
            committed = tf.identity(committed)
        with ledger.lock.hold([committed]):
            pushes = push_ids(self._pushes.read_value())
            is_open = tf.reduce_any(tf.reduce_all(pushes[:1] == committed[:1], 1))
            # Of fewer, if that is a flush, and none that came since.
            made = tf.minimum(tf.shape(committed)[0], self._grads_to_wait)
            pushes = pushes[tf.where(is_open, made, 0) :]
            self._pushes.assign(vector_list(pushes), read_value=False)
            counted = tf.cast(is_open, tf.int64)
            ledger.version.assign_add(counted, read_value=False)
            ledger.count(updates=counted)
            return self._complete(pushes, least)

    def _complete(self, pushes: Any, least: Any) -> Any:
        return pushes[: tf.where(decisions.is_complete(tf.shape(pushes)[0], least), tf.shape(pushes)[0], 0)]

    def __repr__(self) -> str:
        return f"<CommittedPushes: {self._grads_to_wait} for an update, on {self._ledger.home}>"
