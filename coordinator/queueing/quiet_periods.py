"""Periods in which no scheduled closure runs, so that what the client reads and saves meanwhile is of one moment.

    begin: no scheduled closure starts --> each worker ends what it runs, and reports that it is idle --> the block
    end:   closures start again, unless another period goes on

Guarantees:
- Inside the block no scheduled closure runs, and no worker reports that it is idle. Internal closures may run, and
  calls that were cancelled and did not end: the log names them.
- Workers report that they are idle as soon as they have ended what they run. So one that waits for the others in the
  middle of a closure, at the gate of an update rule, goes on instead of waiting for the end of the period.
- However the wait or the block ends, closures start again.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator

from coordinator.errors import StrategyClosedError
from coordinator.queueing.interrupts import uninterrupted
from coordinator.queueing.queue_state import QueueState
from coordinator.queueing.waiting import QueueWaits, deadline_after

_logger = logging.getLogger("coordinator")


class QuietPeriods:
    """The quiet periods of a closure queue. All methods may be called from any thread.

    Args:
      lock: the queue's lock.
      state: the queue's state.
      waits: wait for the queue.
    """

    def __init__(
        self,
        lock: threading.Lock,
        state: QueueState,
        waits: QueueWaits,
    ) -> None:
        self._lock = lock
        self._state = state
        self._waits = waits

    @contextlib.contextmanager
    def period(self, timeout: float | None) -> Iterator[None]:
        """A scope in which no scheduled closure runs.

        Args:
          timeout: how long to wait for what runs when it begins, in seconds; None for no limit.

        Raises:
          TimeoutError: something still ran then; the message says what.
          StrategyClosedError: the queue was stopped.
        """
        deadline = deadline_after(timeout)
        period = object()
        try:
            self._begin(period)
            with self._lock:
                self._waits.wait_quiet(deadline)
                if self._state.stopped:
                    raise StrategyClosedError("A quiet period cannot begin: the strategy is closed.")
                abandoned = [*self._state.abandoned]
            for attempt in abandoned:
                _logger.warning(
                    "strategy.quiet() does not wait for the call of %s on worker %d, which was cancelled and does not "
                    "end; what it still writes may come in between.",
                    attempt.closure,
                    attempt.worker,
                )
            yield
        finally:
            self._end(period)

    def is_active(self, worker: int) -> bool:
        """Returns whether a worker has had a scheduled closure since it last reported that it is idle."""
        return worker in self._state.active

    def report_idle(self, worker: int) -> None:
        """Records that a worker has reported, to all who want to know, that it is idle."""
        with self._lock:
            self._state.active.discard(worker)
            self._waits.notify_settled()

    @uninterrupted
    def _begin(self, period: object) -> None:
        with self._lock:
            self._state.quiet[period] = threading.current_thread()
            for worker in self._state.active:
                self._state.interrupt(worker)

    @uninterrupted
    def _end(self, period: object) -> None:
        with self._lock:
            self._state.quiet.pop(period, None)
            if not self._state.quiet:
                self._state.wake_all()
