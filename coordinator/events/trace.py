"""Consumers of a strategy's events: user callbacks and trace files, which show what each task did over time.

    worker 0             closures_started ---- the function ---- closures_finished
                          ^                                       |
    client      schedule -'                                       '-> finished

Trace files have Chrome's trace format, which the Perfetto UI shows: a JSON object with one event per line. Times are in
microseconds since the beginning of the trace.

Guarantees: a separate thread writes the trace while training runs. After each `flush` the file is complete, so viewers
can open it at any time, also after the program was killed.

Source: "Trace Event Format" (Google, 2016).
"""

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from coordinator.addresses import local_path
from coordinator.background_thread import BackgroundThread
from coordinator.errors import StrategyClosedError
from coordinator.events.event_stream import Event, EventStream, Listener

_logger = logging.getLogger("coordinator")

# The places of jobs in the viewer, from top to bottom.
_PLACES = {"client": 1, "checkpoints": 2, "ps": 10_000, "worker": 20_000}
_END = b"\n]}\n"


class TraceFile:
    """An open trace file: tracks with slices, instants, flows and counters. Times are in seconds since the beginning.

    Viewers show the tracks under the name `process`. Traces with different `number`s can be joined. Raises OSError if
    the file cannot be written, and ValueError if `path` is a URL, because the end of the file is changed in place.
    """

    def __init__(self, path: str | os.PathLike[str], process: str, number: int) -> None:
        self._file = open(local_path(path, "A trace"), "wb")  # noqa: SIM115 - closed by `close`
        self._number = number
        self._tracks: dict[str, int] = {}
        # Lines that are not in the file yet. All lines but the first begin with a comma.
        self._lines = ['{"traceEvents": [\n', json.dumps(self._metadata("process_name", {"name": process}))]

    def track(self, name: str) -> int:
        """Returns the number of the track of a task, such as `worker 0` or `client`."""
        if name not in self._tracks:
            job, _, index = name.partition(" ")
            place = _PLACES.get(job, 30_000) + (int(index) if index.isdigit() else 0)
            # Viewers treat a thread whose id equals its pid as the main thread, so ids start at 10.
            self._tracks[name] = track = 10 + len(self._tracks)
            self._write(self._metadata("thread_name", {"name": name}, track))
            self._write(self._metadata("thread_sort_index", {"sort_index": place}, track))
        return self._tracks[name]

    def slice(
        self,
        track: str,
        name: str,
        start: float,
        seconds: float,
        details: Mapping[str, Any] = MappingProxyType({}),
        flow: tuple[int, str] | None = None,
    ) -> None:
        """Writes an interval on a track; viewers show the details when the interval is selected.

        `flow` is a pair: an arrow's number; "out" if the arrow begins here, "in" if it ends here, "in out" if neither.
        """
        event = self._event("X", name, start, self.track(track))
        event["dur"] = round(1e6 * seconds, 3)
        if flow is not None:
            event["bind_id"] = hex(flow[0])
            event |= {f"flow_{way}": True for way in flow[1].split()}
        self._write(event | ({"args": {**details}} if details else {}))

    def instant(self, track: str, name: str, at: float, details: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._write(self._event("i", name, at, self.track(track)) | {"s": "t", "args": {**details}})

    def counter(self, name: str, at: float, values: Mapping[str, float]) -> None:
        """Writes values from a time on, each as a line in the track of this name. Omits values that are not finite."""
        finite = {line: value for line, value in values.items() if math.isfinite(value)}
        self._write(self._event("C", name, at, 0) | {"args": finite})

    def flush(self) -> None:
        """Writes all pending lines and the end of the file."""
        self._file.write("".join(self._lines).encode() + _END)
        self._lines.clear()
        self._file.flush()
        # The next lines overwrite the end.
        self._file.seek(-len(_END), os.SEEK_CUR)

    def close(self) -> None:
        with self._file:
            self.flush()

    def _event(self, phase: str, name: str, at: float, track: int) -> dict[str, Any]:
        return {"ph": phase, "name": name, "ts": round(1e6 * at, 3), "pid": self._number, "tid": track}

    def _metadata(self, name: str, fields: dict[str, Any], track: int = 0) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": self._number, "tid": track, "args": fields}

    def _write(self, event: dict[str, Any]) -> None:
        self._lines.append(f",\n{json.dumps(event)}")


_ENDS = {
    "closures_finished": "finished",
    "closures_failed": "failed",
    "closures_cancelled": "cancelled",
    "closures_retried": "run again",
}
_AWAY = {"worker_lost": "worker_returned", "parameter_server_lost": "parameter_server_recovered"}
_CLIENT = "client"
# The track with the load of shared resources: the servers, the client, and their hosts.
BUSY = "busy"
# How often the load is read, in seconds.
_POLL_INTERVAL = 2.0


class Trace:
    """A trace that is written until `close` or the end of its `with` block.

    Args:
      events: the stream of the strategy.
      path: the file's path; an existing file is overwritten.
      tasks: the tasks that have a track from the beginning.
      sample: returns how many closures wait, and how many closures run.
      busy: returns the load of shared resources, from 0 to 1, by name; empty for none. Called on a thread of its own,
        since an answer may take as long as a lost server needs to come back.
      close_timeout: how long `close` waits for the file, in seconds.

    Raises:
      OSError: the file cannot be written.
      ValueError: the path is a URL.
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
            # Viewers do not show an empty track.
            self._file.instant(task, "the trace begins", 0.0)
        self._sample = sample
        self._busy = busy
        self._close_timeout = close_timeout
        self._began = self._sampled_at = time.time()
        self._calls = 0
        # Task -> the event of its running call's start, and the number of the call's arrow.
        self._open: dict[str, tuple[Event, int]] = {}
        self._away: dict[str, Event] = {}
        self._error: OSError | None = None
        # When the latest shares were read, and the shares; None once they are written.
        self._shares: tuple[float, Mapping[str, float]] | None = None
        self._polling = BackgroundThread("coordinator-trace-servers", self._poll)
        self._polling.start()
        self._listener = Listener(events, self._write_all, "coordinator-trace", self._end)

    def close(self) -> None:
        """Completes the file. A second call does nothing."""
        self._polling.stop()
        self._listener.close(self._close_timeout)
        self._polling.wait_stopped(self._close_timeout)

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _poll(self) -> None:
        while not self._polling.stopping.is_set():
            shares = self._busy()
            self._shares = time.time(), shares
            self._polling.stopping.wait(_POLL_INTERVAL)

    # The following methods run on the listener's thread.

    def _write_all(self, events: list[Event], dropped: int) -> None:
        if self._error is not None:
            return
        try:
            if dropped:
                self._file.instant(_CLIENT, f"{dropped} events are missing", events[0].time - self._began)
            for event in events:
                self._write(event)
            self._write_counters(events)
            self._file.flush()
        except OSError as error:
            self._error = error
            _logger.warning("The trace %s ends here, since it cannot be written: %s", self._path, error)

    def _write_counters(self, events: list[Event]) -> None:
        now = time.time()
        finished = sum(event.count for event in events if event.kind == "closures_finished")
        waiting, running = self._sample()
        rate = finished / max(now - self._sampled_at, 1e-6)
        self._file.counter("closures", now - self._began, {"waiting": waiting, "running": running})
        self._file.counter("finished per second", self._sampled_at - self._began, {"finished": round(rate, 1)})
        self._sampled_at = now
        polled, self._shares = self._shares, None
        if polled is not None and polled[1]:
            self._file.counter(BUSY, polled[0] - self._began, polled[1])

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
            # JSON has only finite values.
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


class Listeners:
    """The callbacks and traces of one strategy. `close` waits `close_timeout` seconds for running callbacks."""

    def __init__(self, events: EventStream, close_timeout: float) -> None:
        self._events = events
        self._close_timeout = close_timeout
        self._closing: list[Callable[[], None]] = []
        self._is_closed = False

    def on_event(self, callback: Callable[[Event], object]) -> Callable[[], None]:
        """See `ParameterServerStrategy.on_event`."""
        if not callable(callback):
            raise TypeError(f"on_event takes a function that is called with each Event, got {callback!r}.")

        def call(events: list[Event], dropped: int) -> None:
            if dropped:
                text = "%d events were dropped before the callback %r for events could take them: it is too slow."
                _logger.warning(text, dropped, callback)
            for event in events:
                try:
                    callback(event)
                except BaseException:
                    # `SystemExit` is caught too, because it would end the thread.
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
        """Delivers all events and ends the threads; abandons threads that take too long."""
        self._is_closed = True
        for close in tuple(self._closing):
            close()

    def _refuse_closed(self, called: str) -> None:
        if self._is_closed:
            raise StrategyClosedError(f"{called} would see nothing: the strategy is closed.")
