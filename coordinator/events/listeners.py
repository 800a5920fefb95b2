"""What takes the events of a strategy: users' callbacks, and traces."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping

from coordinator.errors import StrategyClosedError
from coordinator.events.event_stream import Event, EventStream, Listener
from coordinator.events.trace import Trace

_logger = logging.getLogger("coordinator")


class Listeners:
    """The callbacks and traces of one strategy.

    Args:
      events: the stream of the strategy.
      close_timeout: how long to wait for callbacks that run, in seconds.
    """

    def __init__(self, events: EventStream, close_timeout: float) -> None:
        self._events = events
        self._close_timeout = close_timeout
        self._closing: list[Callable[[], None]] = []
        self._is_closed = False

    def on_event(self, callback: Callable[[Event], object]) -> Callable[[], None]:
        """See `ParameterServerStrategy.on_event`."""
        if not callable(callback):
            raise TypeError(f"on_event takes a function that is called with each Event, got {callback!r}.")

        def call(found: list[Event], dropped: int) -> None:
            if dropped:
                text = "%d events were dropped before the callback %r for events could take them: it is too slow."
                _logger.warning(text, dropped, callback)
            for event in found:
                try:
                    callback(event)
                except BaseException:
                    # `SystemExit` too: it would be for the thread, which others need.
                    _logger.exception("The callback %r for events raised an error; training continues.", callback)

        self._refuse_closed("on_event")
        listener = Listener(self._events, call)

        def stop() -> None:
            listener.close(self._close_timeout)
            with contextlib.suppress(ValueError):
                self._closing.remove(stop)

        self._closing.append(stop)
        return stop

    def trace(
        self,
        path: str | os.PathLike[str],
        tasks: Iterable[str],
        sample: Callable[[], tuple[int, int]],
        busy: Callable[[], Mapping[str, float]],
    ) -> Trace:
        """Begins a trace; see `Trace`."""
        self._refuse_closed("trace")
        trace = Trace(self._events, path, tasks, sample, busy, self._close_timeout)
        self._closing.append(trace.close)
        return trace

    def close(self) -> None:
        """Passes on all events, and ends the threads, or abandons those that take too long."""
        self._is_closed = True
        for close in tuple(self._closing):
            close()

    def _refuse_closed(self, called: str) -> None:
        if self._is_closed:
            raise StrategyClosedError(f"{called} would see nothing: the strategy is closed.")
