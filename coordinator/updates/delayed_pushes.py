"""Which pushed gradients wait until their delay is over, and which are to be applied now: decided in one place.

push                    pull
  v                       v
waiting --delay over--> due --on all servers--> applied
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from coordinator.updates import decisions
from coordinator.updates.gradient_store import PUSH_ID_SIZE
from coordinator.updates.state.rule_state import Ledger
from coordinator.updates.vector_list import new_vector_list, vector_list, vectors_of

# Of a push: its id, the version that its gradient was computed on, when it was pushed and its delay, in microseconds.
ENTRY_SIZE = PUSH_ID_SIZE + 3
_PULLED_VERSION, _PUSHED_AT, _DELAY = range(PUSH_ID_SIZE, ENTRY_SIZE)
# In seconds. What is longer is cut to this, some three thousand years, which an int64 of microseconds has room for.
LONGEST_DELAY = 1e11


class DelayedPushes:
    """The pushes that wait, in the order in which they came, and those that are due, in the order of their updates.

    To be made in the strategy's scope. Its place in a checkpoint is `QueuedGradients`. All times are the home server's.

    All ids are given to the servers with each update, those that are due first, so that these drop none that is meant
    for a later one.

    Args:
      ledger: where updates, pushes and staleness are counted.
      delay: takes a worker's index, an int64 scalar, and the time of its push, a float64 scalar; gives seconds, a
        float64 scalar.
    """

    def __init__(self, ledger: Ledger, delay: Callable[[Any, Any], Any]) -> None:
        self._ledger = ledger
        self._delay = delay
        with tf.distribute.get_strategy().extended.colocate_vars_with(ledger.version):
            self._waiting, self._due = new_vector_list(ENTRY_SIZE), new_vector_list(ENTRY_SIZE)

    def commit(self, push: Any, pulled_version: Any, size: Any) -> Any:
        """Queues a push that is on all servers, and counts it.

        Args:
          push: its id, int64 [3]; on the home server, as all else.
          pulled_version: the version that the gradient was computed on.
          size: of all that was sent, in bytes.

        Returns:
          Whether it is queued, a bool scalar: a call that was given up pushes nothing any more.
        """
        ledger, fence = self._ledger, self._ledger.present.fence
        with tf.control_dependencies([push, pulled_version, size]):
            now = tf.timestamp()
        delay = self._delay(push[0], now)
        with ledger.lock.hold([push, pulled_version, size, now, delay]):
            worker, connection, _ = tf.unstack(push)
            is_own = connection >= fence.sparse_read(worker)
            fence.scatter_nd_max([[worker]], [connection])
            entry = tf.concat([push, tf.stack([pulled_version, _microseconds(now), _microseconds(delay)])], 0)
            counted = tf.cast(is_own, tf.int64)
            self._assign(self._waiting, tf.concat([_entries(self._waiting), entry[None][:counted]], 0))
            ledger.note_step(worker, counted)
            ledger.count(pushes=1, rejected=1 - counted, bytes_pushed=size, worker=worker, steps=counted)
            return is_own

    def release(self, everything: Any) -> Any:
        """Decides whose delay is over.

        Args:
          everything: whether it is over for all of them, a bool scalar.

        Returns:
          The ids of those that are due, then of all others, int64 [n, 3]; none if none is due.
        """
        with self._ledger.lock.hold():
            now, waiting = _microseconds(tf.timestamp()), _entries(self._waiting)
            is_due = everything | decisions.is_delay_over(now, waiting[:, _PUSHED_AT], waiting[:, _DELAY])
            due = tf.concat([_entries(self._due), tf.boolean_mask(waiting, is_due)], 0)
            waiting = tf.boolean_mask(waiting, ~is_due)
            self._assign(self._due, due)
            self._assign(self._waiting, waiting)
            return _ids(due, waiting, 1)

    def complete(self, least: Any) -> Any:
        """The ids of those that are due already, then of all others; none if fewer than `least` are due."""
        with self._ledger.lock.hold():
            return _ids(_entries(self._due), _entries(self._waiting), least)

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
            due = _entries(self._due)
            is_open = tf.reduce_any(tf.reduce_all(due[:1, :PUSH_ID_SIZE] == committed[:1], 1))
            counted = tf.cast(is_open, tf.int64)
            # A sum, since there may be none.
            pulled_version = tf.reduce_sum(due[:counted, _PULLED_VERSION])
            staleness = decisions.staleness(ledger.version.read_value(), pulled_version)
            ledger.version.assign_add(counted, read_value=False)
            ledger.count(updates=counted, staleness=staleness, gradients=counted)
            due = due[counted:]
            self._assign(self._due, due)
            return _ids(due, _entries(self._waiting), least)

    def entries(self) -> Any:
        """All that are queued, those that are due first, int64 [n, ENTRY_SIZE]."""
        with self._ledger.lock.hold():
            return tf.concat([_entries(self._due), _entries(self._waiting)], 0)

    def replace(self, entries: Any) -> Any:
        """Queues these instead, int64 [n, ENTRY_SIZE]; what is due among them is found out at the next pull."""
        with self._ledger.lock.hold([entries]):
            self._assign(self._due, entries[:0])
            return self._assign(self._waiting, entries)

    def _assign(self, variable: tf.Variable, entries: Any) -> Any:
        return variable.assign(vector_list(entries), read_value=False)

    def __repr__(self) -> str:
        return f"<DelayedPushes on {self._ledger.home}>"


def _ids(due: Any, waiting: Any, least: Any) -> Any:
    number = tf.shape(due)[0] + tf.shape(waiting)[0]
    shown = tf.where(decisions.is_complete(tf.shape(due)[0], least), number, 0)
    return tf.concat([due, waiting], 0)[:, :PUSH_ID_SIZE][:shown]


def _microseconds(seconds: Any) -> Any:
    """As an int64, from 0 on; what is no number is as long as can be."""
    in_reach = tf.where(seconds < LONGEST_DELAY, tf.maximum(seconds, 0), LONGEST_DELAY)
    return tf.cast(in_reach * 1e6, tf.int64)


def _entries(variable: tf.Variable) -> Any:
    return vectors_of(variable.read_value(), ENTRY_SIZE)
