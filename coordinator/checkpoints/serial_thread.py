"""A thread that makes calls one after the other, and is there only while there are some."""

import collections
import logging
import math
import threading
import time
from collections.abc import Callable

from coordinator.ps_strategy.membership.bounded_calls import on_own_thread
from coordinator.queueing.interrupts import uninterrupted

_logger = logging.getLogger("coordinator")

# In seconds.
_STALL_REPORT_INTERVAL = 60.0


class SerialThread:
    """Makes calls in the background, in order. All methods may be called from any thread.

    Args:
      name: of the thread.
      calls: what they do, for messages.
    """

    def __init__(self, name: str, calls: str) -> None:
        self._name = name
        self._purpose = calls
        # A signal may interrupt a condition's `__enter__`, which is Python, and leave it locked; not a lock's.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._calls: collections.deque[Callable[[], object]] = collections.deque()
        self._is_running = False

    @uninterrupted
    def submit(self, call: Callable[[], object]) -> None:
        """Makes a call after those before it. If it raises an exception, that is logged."""
        with self._lock:
            self._calls.append(call)
            if self._is_running:
                return
            self._is_running = True
        on_own_thread(self._name, self._run)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until all calls have returned; returns whether they have in `timeout` seconds. Reports a long wait."""
        began = time.monotonic()
        remaining = math.inf if timeout is None else timeout
        while True:
            with self._lock:
                if self._changed.wait_for(lambda: not self._is_running, min(remaining, _STALL_REPORT_INTERVAL)):
                    return True
            remaining -= _STALL_REPORT_INTERVAL
            if remaining <= 0:
                return False
            _logger.warning("%s has taken %.0f s, and is waited for.", self._purpose, time.monotonic() - began)

    def _run(self) -> None:
        while (call := self._next()) is not None:
            try:
                call()
            except BaseException:
                # `SystemExit` too: a checkpoint policy or a callback of the program may raise it.
                _logger.exception("A call on the thread %s raised an exception.", self._name)

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            if self._calls:
                return self._calls.popleft()
            self._is_running = False
            self._changed.notify_all()
            return None
