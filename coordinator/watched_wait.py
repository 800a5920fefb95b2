"""Waiting on a condition with a deadline, and with a report when nothing moves: no wait of the queue is silent."""

import threading
import time
from collections.abc import Callable
from typing import Any


class WatchedWait:
    """Waits until something is true.

    Args:
      interval: seconds without progress after which a wait is reported, and again after each further interval.
      report: called with words on what is awaited, without the condition's lock.
      progress: a value that changes whenever something moves.
      describe: words for what the wait is up against.
    """

    def __init__(
        self,
        interval: float,
        report: Callable[[str], None],
        progress: Callable[[], Any],
        describe: Callable[[], str],
    ) -> None:
        self._interval = interval
        self._report = report
        self._progress = progress
        self._describe = describe

    def until(
        self, condition: threading.Condition, is_true: Callable[[], bool], awaited: str, deadline: float | None
    ) -> None:
        """Waits on `condition`, whose lock the caller holds, until `is_true()`.

        Args:
          condition: notified when `is_true` may have changed.
          is_true: what is awaited.
          awaited: words for it.
          deadline: on the `time.monotonic` clock; None for none.

        Raises:
          TimeoutError: not by the deadline.
        """
        if is_true():
            return
        start = time.monotonic()
        progress = self._progress()
        while not is_true():
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise TimeoutError(f"Timed out after {now - start:.1f} s: {awaited}; {self._describe()}.")
            tick = self._interval if deadline is None else min(self._interval, deadline - now)
            notified = condition.wait(tick)
            if not notified and tick == self._interval and progress == self._progress():
                waited = time.monotonic() - start
                self._report_unlocked(condition, f"No progress for {waited:.0f} s: {awaited}; {self._describe()}.")
            progress = self._progress()

    def _report_unlocked(self, condition: threading.Condition, text: str) -> None:
        condition.release()
        try:
            self._report(text)
        finally:
            condition.acquire()
