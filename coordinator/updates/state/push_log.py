"""Which pushed gradients make the next updates: decided on the home server, for all servers.

    PushLog          push --accepted--> ready --grads_to_wait of them, on all servers--> applied
    DelayedPushes    push --> delayed --delay over, at a pull--> ready --one, on all servers--> applied

The ids of all logged pushes are passed to the servers with each update, those of the update first, so that no server
drops a row that a later update needs.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.server_mutex import client_may_call
from coordinator.updates import decisions
from coordinator.updates.state.gradient_store import PUSH_ID_SIZE, new_vector_list, vector_list, vectors_of
from coordinator.updates.state.rule_state import NO_STEP, RuleState

# Of a push: its id, the version that its gradient was computed on, and two more numbers: with `DelayedPushes` when it
# was pushed and its delay, in microseconds; with `PushLog` the number of its range, and 0.
ENTRY_SIZE = PUSH_ID_SIZE + 3
_PULLED_VERSION, _PUSHED_AT, _DELAY = range(PUSH_ID_SIZE, ENTRY_SIZE)
_RANGE = _PUSHED_AT
# In seconds: longer delays are cut to some three thousand years, for which an int64 of microseconds has room.
MAX_DELAY = 1e11


class PushLog:
    """The accepted pushes that are in no finished update, in the order of their arrival. Not in checkpoints.

    Created in the strategy's scope.

    Args:
      state: counts updates, pushes, rejections and staleness.
      grads_to_wait: gradients per update.
      is_accepted: decides about a push, see `Accumulating`; called on the home server, under the state's lock.
    """

    def __init__(self, state: RuleState, grads_to_wait: int, is_accepted: Callable[[Any, Any], Any]) -> None:
        self._state = state
        self._grads_to_wait = grads_to_wait
        self._is_accepted = is_accepted
        with tf.distribute.get_strategy().extended.colocate_vars_with(state.version):
            self._ready = new_vector_list(ENTRY_SIZE)

    def waiting(self) -> Any:
        """Returns the number of gradients that are in no update yet, an int64 scalar. Called under the state's lock."""
        return tf.cast(tf.raw_ops.TensorListLength(input_handle=self._ready.read_value()), tf.int64)

    def add(
        self, push: Any, pulled_version: Any, size: Any, not_finite: Any, number: Any = None
    ) -> tuple[Any, Any, Any]:
        """Logs and counts a push that is on all servers.

        Args:
          push: its id, int64 [3]; on the home server, like all arguments.
          pulled_version: the version that the gradient was computed on.
          size: bytes that were sent.
          not_finite: 1 if it has a value that is not finite, otherwise 0.
          number: of the range that the gradient was computed on; None if ranges are not recorded.

        Returns:
          Whether it is accepted, a bool scalar; a push of an abandoned call is not. Whether it is refused because its
          range is committed, a bool scalar, or None without ranges. And the result of `due`.
        """
        state, pulled_versions = self._state, self._state.workers.pulled_version
        ranges = [] if number is None else [number]
        with state.lock.hold([push, pulled_version, size, not_finite, *ranges]):
            worker, _, _ = tf.unstack(push)
            version, waiting = state.version.read_value(), self.waiting()
            is_own = self._is_own(push)
            accepted = is_own & self._is_accepted(worker, pulled_version)
            is_repeated = None
            if number is not None:
                is_repeated = state.committed.is_committed(number)
                accepted &= ~is_repeated
                state.committed.commit(number, accepted)
            in_flight = tf.where(is_own, tf.constant(NO_STEP, tf.int64), pulled_versions.sparse_read(worker))
            pulled_versions.scatter_nd_update([[worker]], [in_flight])
            # The waiting gradients are applied before this one.
            staleness = decisions.staleness(version + waiting // self._grads_to_wait, pulled_version)
            counted = {"bytes_pushed": size, "not_finite": not_finite, "staleness": staleness}
            ready = self._append(self._ready, accepted, push, pulled_version, *ranges, **counted)
            return accepted, is_repeated, self._due(ready, self._grads_to_wait)

    @client_may_call()
    def waiting_ranges(self) -> Any:
        """Returns the numbers of the ranges of the pushes that are in no update yet, int64 [n]."""
        with self._state.lock.hold():
            return _entries(self._ready)[:, _RANGE]

    @client_may_call(tf.TensorSpec([], tf.int32))
    def due(self, minimum: Any) -> Any:
        """Returns the ids, those of the next update first, int64 [n, 3]; n = 0 if fewer than `minimum` are ready."""
        with self._state.lock.hold():
            return self._due(_entries(self._ready), minimum)

    @client_may_call(tf.TensorSpec([None, PUSH_ID_SIZE], tf.int64), tf.TensorSpec([], tf.int32))
    def finish(self, ids: Any, minimum: Any) -> Any:
        """Counts an update that all servers have made, unless it is counted already.

        Args:
          ids: those that the servers were given, int64 [n, 3], n > 0.
          minimum: see `due`.

        Returns:
          The result of `due` for the next update.
        """
        state = self._state
        with tf.device(state.home):
            ids = tf.identity(ids)
        with state.lock.hold([ids]):
            ready = _entries(self._ready)
            is_open = tf.reduce_any(tf.reduce_all(ready[:1, :PUSH_ID_SIZE] == ids[:1], 1))
            # Fewer than `grads_to_wait` in a flush, which leaves those that came since.
            applied = tf.where(is_open, tf.minimum(tf.shape(ids)[0], self._grads_to_wait), 0)
            self._count_update(tf.cast(is_open, tf.int64), ready[:applied])
            ready = ready[applied:]
            _assign(self._ready, ready)
            return self._due(ready, minimum)

    def _is_own(self, push: Any) -> Any:
        """Returns False for an abandoned call on a closed connection, which must not count as the worker's own."""
        worker, connection, _ = tf.unstack(push)
        fence = self._state.workers.fence
        is_own = connection >= fence.sparse_read(worker)
        fence.scatter_nd_max([[worker]], [connection])
        return is_own

    def _append(
        self, log: tf.Variable, accepted: Any, push: Any, pulled_version: Any, *times: Any, **counted: Any
    ) -> Any:
        """Appends a push if it is accepted, and counts it; returns all entries."""
        state, steps = self._state, tf.cast(accepted, tf.int64)
        zeros = [tf.zeros([], tf.int64)] * (ENTRY_SIZE - PUSH_ID_SIZE - 1 - len(times))
        entry = tf.concat([push, tf.stack([pulled_version, *times, *zeros])], 0)
        entries = tf.concat([_entries(log), entry[None][:steps]], 0)
        _assign(log, entries)
        state.advance_clock(push[0], steps)
        state.count(pushes=1, rejected=1 - steps, worker=push[0], steps=steps, **counted)
        return entries

    def _count_update(self, updates: Any, _: Any) -> None:
        self._state.version.assign_add(updates, read_value=False)
        self._state.count(updates=updates)

    def _due(self, ready: Any, minimum: Any, *others: Any) -> Any:
        entries = tf.concat([ready, *others], 0)
        shown = tf.where(decisions.is_complete(tf.shape(ready)[0], minimum), tf.shape(entries)[0], 0)
        return entries[:, :PUSH_ID_SIZE][:shown]


class DelayedPushes(PushLog):
    """A log whose pushes are ready after a delay, and make an update each. A checkpoint saves it as `QueuedGradients`.

    All times are the home server's. Staleness is counted when a gradient is applied.

    Args:
      state: see `PushLog`.
      delay: takes a worker's index, an int64 scalar, and the time of its push, a float64 scalar; returns seconds, a
        float64 scalar.
    """

    def __init__(self, state: RuleState, delay: Callable[[Any, Any], Any]) -> None:
        super().__init__(state, 1, lambda _, __: tf.constant(True))
        self._delay = delay
        with tf.distribute.get_strategy().extended.colocate_vars_with(state.version):
            self._delayed = new_vector_list(ENTRY_SIZE)

    def add(self, push: Any, pulled_version: Any, size: Any, not_finite: Any, _: Any = None) -> tuple[Any, Any, Any]:
        """See `PushLog`; ranges are not recorded, and a push never makes an update due, so the ids are None."""
        with tf.control_dependencies([push, pulled_version, size]):
            now = tf.timestamp()
        delay = self._delay(push[0], now)
        with self._state.lock.hold([push, pulled_version, size, not_finite, now, delay]):
            is_own = self._is_own(push)
            times = _microseconds(now), _microseconds(delay)
            counted = {"bytes_pushed": size, "not_finite": not_finite}
            self._append(self._delayed, is_own, push, pulled_version, *times, **counted)
            return is_own, None, None

    @client_may_call(tf.TensorSpec([], tf.bool))
    def release(self, everything: Any) -> Any:
        """Makes the pushes ready whose delay is over.

        Args:
          everything: True releases all of them; a bool scalar.

        Returns:
          The result of `due`.
        """
        with self._state.lock.hold():
            now, delayed = _microseconds(tf.timestamp()), _entries(self._delayed)
            is_over = everything | decisions.is_delay_over(now, delayed[:, _PUSHED_AT], delayed[:, _DELAY])
            ready = tf.concat([_entries(self._ready), tf.boolean_mask(delayed, is_over)], 0)
            _assign(self._ready, ready)
            _assign(self._delayed, tf.boolean_mask(delayed, ~is_over))
            return self._due(ready, 1)

    @client_may_call()
    def entries(self) -> Any:
        """Returns all pushes, the ready ones first, int64 [n, ENTRY_SIZE]."""
        with self._state.lock.hold():
            return tf.concat([_entries(self._ready), _entries(self._delayed)], 0)

    @client_may_call(tf.TensorSpec([None, ENTRY_SIZE], tf.int64))
    def replace(self, entries: Any) -> None:
        """Replaces all pushes, int64 [n, ENTRY_SIZE]; the next pull finds out which are ready."""
        with self._state.lock.hold([entries]):
            _assign(self._ready, entries[:0])
            _assign(self._delayed, entries)

    def _count_update(self, updates: Any, applied: Any) -> None:
        # A sum, since there may be none.
        pulled_version = tf.reduce_sum(applied[:, _PULLED_VERSION])
        staleness = decisions.staleness(self._state.version.read_value(), pulled_version)
        self._state.version.assign_add(updates, read_value=False)
        self._state.count(updates=updates, staleness=staleness, gradients=updates)

    def _due(self, ready: Any, minimum: Any, *others: Any) -> Any:
        return super()._due(ready, minimum, _entries(self._delayed), *others)


def _microseconds(seconds: Any) -> Any:
    """Converts to int64 microseconds from 0 to MAX_DELAY; NaN becomes MAX_DELAY."""
    bounded = tf.where(seconds < MAX_DELAY, tf.maximum(seconds, 0), MAX_DELAY)
    return tf.cast(bounded * 1e6, tf.int64)


def _entries(variable: tf.Variable) -> Any:
    return vectors_of(variable.read_value(), ENTRY_SIZE)


def _assign(variable: tf.Variable, entries: Any) -> None:
    variable.assign(vector_list(entries), read_value=False)
