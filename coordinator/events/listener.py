"""A thread that passes on events, so that a slow callback delays neither training nor other callbacks."""

import logging
import threading
from collections.abc import Callable

from coordinator.events.event_stream import Event, EventStream

_logger = logging.getLogger("coordinator")

# Between two looks at the stream, in seconds.
_INTERVAL = 0.1


class Listener:
    """A thread that calls a function with the events from now on, in order, until it is closed.

    Args:
      events: the stream.
      callback: called with the events since the call before, at least one, and with how many were dropped before them.
      name: of the thread.
      finish: called at the end, on the thread.
    """

    def __init__(
        self,
        events: EventStream,
        callback: Callable[[list[Event], int], object],
        name: str = "coordinator-events",
        finish: Callable[[], object] | None = None,
    ) -> None:
        self._events = events
        self._callback = callback
        self._finish = finish
        self._next = events.recorded
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self, timeout: float | None = None) -> None:
        """Passes on what was recorded until now, and ends the thread. May be called again."""
        self._closed.set()
        if self._thread is threading.current_thread():
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            _logger.warning("A callback for events has not returned for %g s; its thread is left behind.", timeout)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closed.wait(_INTERVAL)
            found, self._next, dropped = self._events.since(self._next)
            try:
                if found:
                    self._callback(found, dropped)
            except Exception:
                _logger.exception("A callback for events raised an error; it is called again for those that follow.")
        if self._finish is not None:
            self._finish()
