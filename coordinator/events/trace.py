"""A trace of a training: what each task did when, from its events.

    worker 0             closures_started ---- the function ---- closures_finished
                          ^                                       |
    client      schedule -'                                       '-> finished

Promises: it is written by a separate thread, while training runs, and can be opened at any time.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from coordinator.events.event_stream import Event, EventStream, Listener
from coordinator.events.trace_file import TraceFile

_logger = logging.getLogger("coordinator")

_ENDS = {
    "closures_finished": "finished",
    "closures_failed": "failed",
    "closures_cancelled": "cancelled",
    "closures_retried": "run again",
}
_AWAY = {"worker_lost": "worker_returned", "parameter_server_lost": "parameter_server_recovered"}
_CLIENT = "client"
# The track with the load of what all workers share: the servers, the client, and their hosts.
BUSY = "busy"


class Trace:
    """A trace that is being written, until it is closed or its block is left.

    Args:
      events: the stream of the strategy.
      path: of the file, which is overwritten.
      tasks: those that have a track from the beginning.
      sample: returns how many closures wait, and how many run.
      busy: returns the load of what all workers share, from 0 to 1, by name; empty for none. May take seconds.
      close_timeout: how long `close` waits for the file, in seconds.

    Raises:
      OSError: the file cannot be written.
    """

    def __init__(
        self,
        events: EventStream,
        path: str | os.PathLike[str],
        tasks: Iterable[str],
        sample: Callable[[], tuple[int, int]],
        busy: Callable[[], Mapping[str, float]],
        close_timeout: float,
    ) -> None:
        self._path = path
        self._file = TraceFile(path, "training", 1)
        for task in tasks:
            # A track without anything on it is not shown.
            self._file.instant(task, "the trace begins", 0.0)
        self._sample = sample
        self._busy = busy
        self._close_timeout = close_timeout
        self._began = self._sampled_at = time.time()
        self._calls = 0
        # What has begun on each task: the event, and the number of the arrow of a call.
        self._open: dict[str, tuple[Event, int]] = {}
        self._away: dict[str, Event] = {}
        self._error: OSError | None = None
        self._listener = Listener(events, self._write_all, "coordinator-trace", self._end)

    def close(self) -> None:
        """Completes the file. May be called again."""
        self._listener.close(self._close_timeout)

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What follows runs on the thread.

    def _write_all(self, found: list[Event], dropped: int) -> None:
        if self._error is not None:
            return
        try:
            if dropped:
                self._file.instant(_CLIENT, f"{dropped} events are missing", found[0].time - self._began)
            for event in found:
                self._write(event)
            self._write_counters(found)
            self._file.flush()
        except OSError as error:
            self._error = error
            _logger.warning("The trace %s ends here, since it cannot be written: %s", self._path, error)

    def _write_counters(self, found: list[Event]) -> None:
        now = time.time()
        finished = sum(event.count for event in found if event.kind == "closures_finished")
        waiting, running = self._sample()
        rate = finished / max(now - self._sampled_at, 1e-6)
        self._file.counter("closures", now - self._began, {"waiting": waiting, "running": running})
        self._file.counter("finished per second", self._sampled_at - self._began, {"finished": round(rate, 1)})
        self._sampled_at = now
        if shares := self._busy():
            self._file.counter(BUSY, time.time() - self._began, shares)

    def _write(self, event: Event) -> None:
        at = event.time - self._began
        if event.kind == "closures_started":
            self._calls += 1
            self._open[event.task] = event, self._calls
            self._file.slice(_CLIENT, f"schedule {event.name}", at - event.seconds, 0.0, flow=(self._calls, "out"))
        elif event.kind in _ENDS:
            if event.task in self._open:
                self._end_call(*self._open.pop(event.task), event, at)
        elif event.kind in _AWAY:
            self._away[event.task] = event
        elif event.kind in _AWAY.values() and event.task in self._away:
            self._end_absence(self._away.pop(event.task), at, event)
        elif event.kind in ("checkpoint_saved", "checkpoint_failed"):
            name = event.kind.replace("_", " ")
            self._file.slice("checkpoints", name, at - event.seconds, event.seconds, _details(event))
        elif event.kind == "value_reported":
            value = float(event.detail)
            # JSON has no others.
            if math.isfinite(value):
                self._file.counter(event.name, at, {event.name: value})
        else:
            self._file.instant(event.task or _CLIENT, event.kind.replace("_", " "), at, _details(event))

    def _end_call(self, start: Event, number: int, end: Event, at: float) -> None:
        outcome = _ENDS[end.kind] + (f": {end.detail}" if end.detail else "")
        details = {"closures": start.count, "outcome": outcome, "seconds waited": start.seconds}
        self._file.slice(
            start.task, start.name, start.time - self._began, end.time - start.time, details, (number, "in out")
        )
        self._file.slice(_CLIENT, f"{_ENDS[end.kind]}: {start.name}", at, 0.0, flow=(number, "in"))

    def _end_absence(self, lost: Event, at: float, back: Event | None) -> None:
        start = lost.time - self._began
        details = _details(lost)
        if back is not None and back.kind == "parameter_server_recovered":
            details |= {"steps lost": back.count, "checkpoint": back.name}
        self._file.slice(lost.task, "lost", start, at - start, details)

    def _end(self) -> None:
        if self._error is None:
            at = time.time() - self._began
            for start, number in self._open.values():
                began, details = start.time - self._began, {"closures": start.count}
                self._file.slice(start.task, start.name, began, at - began, details, (number, "in"))
            for lost in self._away.values():
                self._end_absence(lost, at, None)
        try:
            self._file.close()
        except OSError as error:
            _logger.warning("The trace %s is not complete: %s", self._path, error)


def _details(event: Event) -> dict[str, Any]:
    fields = {"name": event.name, "detail": event.detail, "seconds": event.seconds}
    return {name: value for name, value in fields.items() if value}
