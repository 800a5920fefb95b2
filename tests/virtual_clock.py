"""Time that passes only as tests say: for threads, and for an asyncio loop."""

import asyncio
import selectors
import threading
from typing import Any

from coordinator.clock import Clock


class VirtualClock(Clock):
    """Time that passes by `advance` alone."""

    def __init__(self) -> None:
        self._now = 0.0
        self._changed = threading.Condition()

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        with self._changed:
            self._now += seconds
            self._changed.notify_all()

    def wait(self, event: threading.Event, timeout: float) -> bool:
        with self._changed:
            deadline = self._now + timeout
            # The event does not notify: this looks after it now and then.
            while self._now < deadline and not event.is_set():
                self._changed.wait(0.001)
        return event.is_set()


class PassingClock(VirtualClock):
    """Time that passes at once while the only thread waits."""

    def wait(self, event: threading.Event, timeout: float) -> bool:
        if not event.is_set():
            self.advance(timeout)
        return event.is_set()


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time passes at once while it has nothing else to do than to wait for a time."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_NoWaiting(self))

    def time(self) -> float:
        return self.now


class _NoWaiting(selectors.DefaultSelector):  # type: ignore[valid-type,misc]
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(None if timeout is None else 0)
        if not ready and timeout is not None:
            self._loop.now += max(timeout, 0.0)
        return ready
