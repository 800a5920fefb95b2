"""Callbacks for events, each on a thread of its own, so that none delays training or another one."""

import logging
import threading
from collections.abc import Callable

from coordinator.errors import StrategyClosedError
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
        """Passes on what was recorded until now, and ends the thread; see `Listeners.close`. May be called again."""
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


class Listeners:
    """The listeners of one strategy.

    Args:
      events: the stream of the strategy.
      close_timeout: how long to wait for callbacks that run, in seconds.
    """

    def __init__(self, events: EventStream, close_timeout: float) -> None:
        self._events = events
        self._close_timeout = close_timeout
        self._listeners: list[Listener] = []
        self._is_closed = False

    def on_event(self, callback: Callable[[Event], object]) -> Callable[[], None]:
        """See `ParameterServerStrategy.on_event`."""
        if not callable(callback):
            raise TypeError(f"on_event takes a function that is called with each Event, got {callback!r}.")
        if self._is_closed:
            raise StrategyClosedError("on_event would see nothing: the strategy is closed.")

        def call(found: list[Event], dropped: int) -> None:
            if dropped:
                text = "%d events were dropped before the callback %r for events could take them: it is too slow."
                _logger.warning(text, dropped, callback)
            for event in found:
                try:
                    callback(event)
                except Exception:
                    _logger.exception("The callback %r for events raised an error; training continues.", callback)

        listener = Listener(self._events, call)
        self._listeners.append(listener)
        return lambda: listener.close(self._close_timeout)

    def close(self) -> None:
        """Passes on all events, and ends the threads, or abandons those that take too long."""
        self._is_closed = True
        for listener in self._listeners:
            listener.close(self._close_timeout)
