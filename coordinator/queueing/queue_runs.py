"""Many runs of one closure in a queue: a worker takes a part of them, and makes as many as are worth one call."""

import threading
from collections.abc import Callable

from coordinator.queueing.closure import Attempt, Closure
from coordinator.queueing.queue_state import QueueState
from coordinator.queueing.run_parts import available, number
from coordinator.runs_future import RunsFuture


class QueueRuns:
    """The parts of many runs in a closure queue. All methods may be called from any thread.

    Args:
      lock: the queue's lock.
      state: the queue's state.
      has_room: notified when fewer closures wait.
      hand_out: wakes idle workers for a closure; called with the lock held.
      cancel: cancels a closure, with an error unless its user does; called without the lock.
    """

    def __init__(
        self,
        lock: threading.Lock,
        state: QueueState,
        has_room: threading.Condition,
        hand_out: Callable[[int | None], None],
        cancel: Callable[[Closure, BaseException | None], bool],
    ) -> None:
        self._lock = lock
        self._state = state
        self._has_room = has_room
        self._hand_out = hand_out
        self._cancel = cancel

    def available(self, attempt: Attempt) -> int:
        """Returns how many runs a started attempt may make in its call; it may change at any time."""
        with self._lock:
            return available(attempt)

    def begin(self, attempt: Attempt, choose: Callable[[int], int]) -> int:
        """Begins the call of a started attempt; the runs of its share that it is not to make wait for other workers.

        Args:
          attempt: was started just now.
          choose: takes the number of runs that are possible, returns how many to make. Called with the lock held.

        Returns:
          The number of runs to make.
        """
        closure, state = attempt.closure, self._state
        with self._lock:
            if not closure.has_ended and not state.is_unwanted(closure):
                is_alone = state.is_paused_or_quiet or state.is_over_for(attempt.worker)
                count = 1 if is_alone else choose(available(attempt))
                self._leave_others(attempt, count)
                return count
        # What cancels it may be on its way still.
        self._cancel(closure, state.unwanted_error(closure))
        return 1

    def cancel(self, whole: RunsFuture) -> bool:
        """Cancels all runs that have not ended; returns False if there are none."""
        while True:
            with self._lock:
                part = next(iter(whole.parts), None)
            if part is None:
                return False
            if self._cancel(part, None):
                return True

    def _leave_others(self, attempt: Attempt, count: int) -> None:
        """Leaves an attempt this many runs; the others wait, fewer than before if it takes more than its share."""
        closure, state = attempt.closure, self._state
        more = count - closure.runs
        rest = number(attempt, count)
        # It waits again if it is overdue.
        state.waiting.recount(closure)
        if rest is not None and rest.counts:
            state.waiting.recount(rest)
            if not rest.runs:
                state.waiting.remove(rest)
                state.unsettled -= 1
        elif rest is not None:
            state.add_rest(rest)
        if more > 0:
            self._has_room.notify(more)
        self._hand_out(closure.target)
