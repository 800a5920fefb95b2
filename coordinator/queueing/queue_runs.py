"""Many runs of one closure in a queue: what the call of a worker has ended is reported at once, the rest goes on.

A worker keeps its part for a short time, then leaves the others in the queue: other workers may be free by then.
"""

import threading
import time
from collections.abc import Callable

from coordinator.events.event_stream import EventStream
from coordinator.queueing.closure import Attempt, Closure
from coordinator.queueing.queue_state import QueueState
from coordinator.runs_future import RunsFuture


class QueueRuns:
    """The parts of many runs in a closure queue. All methods may be called from any thread.

    Args:
      lock: the queue's lock.
      state: the queue's state.
      events: what happens to closures is recorded there.
      hand_out: wakes idle workers for a closure; called with the lock held.
      cancel: cancels a closure; called without the lock.
    """

    def __init__(
        self,
        lock: threading.Lock,
        state: QueueState,
        events: EventStream,
        hand_out: Callable[[int | None], None],
        cancel: Callable[[Closure], bool],
    ) -> None:
        self._lock = lock
        self._state = state
        self._events = events
        self._hand_out = hand_out
        self._cancel = cancel

    def begin(self, attempt: Attempt, count: int) -> None:
        """Records that an attempt makes its next `count` runs in one call."""
        attempt.runs = count
        attempt.started = time.monotonic()

    def confirm(self, attempt: Attempt, result: object, *, may_continue: bool) -> bool:
        """Records the stacked results of an attempt's latest call, unless they are the last that it is to make.

        Args:
          attempt: the attempt.
          result: the results.
          may_continue: whether it may make another call.

        Returns:
          Whether it is to make another one. If not, the closure has only the runs of this one left, and others wait.
        """
        closure, count = attempt.closure, attempt.runs
        with self._lock:
            if closure.has_ended or count == closure.runs:
                return False
            if not may_continue or not self._may_continue(attempt.worker):
                self._state.split(closure, count)
                self._hand_out(closure.target)
                return False
            whole, first = closure.whole, self._state.confirm(attempt)
        assert whole is not None
        # Since when the next call waits.
        closure.waiting_since = time.monotonic()
        seconds = closure.waiting_since - attempt.started
        self._events.record("closures_finished", f"worker {attempt.worker}", closure.name, count, seconds)
        whole.add(first, count, result)
        return True

    def cancel(self, whole: RunsFuture) -> bool:
        """Cancels all runs that have not ended; returns False if there are none."""
        while True:
            with self._lock:
                part = next(iter(whole.parts), None)
            if part is None:
                return False
            if self._cancel(part):
                return True

    def _may_continue(self, worker: int) -> bool:
        state = self._state
        return not (state.is_held or state.is_over_for(worker) or state.waiting.has_internal(worker))
