"""The events of one strategy, in a ring buffer: what happened, where, when, and how long it took.

    worker threads, recovery, checkpoints --record--> [ the latest events ] --since--> callbacks, log, trace, dashboard

Guarantees:
- `record` neither blocks nor calls other code. The closures of one call are one event with `count` closures.
- The counts of all events of a kind add up to the corresponding count in `strategy.cluster.statistics()`.
- A slow reader misses events, learns how many, and delays no other thread.
- `Listener.deliver` makes a listener read at once, and says whether it has; `on_delivery` is called after each reading.
"""

import contextlib
import dataclasses
import datetime
import itertools
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal

from coordinator.background_thread import BackgroundThread

_logger = logging.getLogger("coordinator")

# How often a listener reads the stream, in seconds.
_INTERVAL = 0.1

Kind = Literal[
    "closures_started",
    "closures_finished",
    "closures_failed",
    "closures_cancelled",
    "closures_retried",
    "function_quarantined",
    "worker_joined",
    "worker_lost",
    "worker_returned",
    "worker_left",
    "parameter_server_lost",
    "parameter_server_recovered",
    "checkpoint_saved",
    "checkpoint_failed",
    "rule_changed",
    "thread_failed",
    "value_reported",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something that happened while a strategy ran. See docs/events.md for the meaning of each kind.

    Attributes:
      time: when it happened, in seconds since the epoch.
      kind: what happened, such as `closures_finished` or `worker_lost`.
      task: where: `worker 0`, `ps 1`, or "" for the client.
      name: the function, the path of the checkpoint, or the update rule.
      count: the number of closures, or of lost steps.
      seconds: the duration of the call, wait or other work that has ended, in seconds.
      detail: the reason, or other facts.
    """

    time: float
    kind: Kind
    task: str = ""
    name: str = ""
    count: int = 1
    seconds: float = 0.0
    detail: str = ""


class EventStream:
    """A ring of the latest events, numbered from 0. Any thread may call all methods."""

    def __init__(self, capacity: int = 65_536) -> None:
        # Holds tuples, because a tuple costs a fifth of an `Event`, and most events are never read.
        self._ring: deque[tuple[float, Kind, str, str, int, float, str]] = deque(maxlen=capacity)
        self._recorded = 0
        # A leaf lock: nothing is called while it is held.
        self._lock = threading.Lock()
        self._listeners: dict[Listener, None] = {}
        self.on_delivery: Callable[[], object] = lambda: None

    @property
    def recorded(self) -> int:
        """How many events were recorded; also the number of the next event."""
        return self._recorded

    def listeners(self) -> list["Listener"]:
        """Returns the listeners whose threads have not ended."""
        return [*self._listeners.copy()]

    def add(self, listener: "Listener") -> None:
        self._listeners[listener] = None

    def remove(self, listener: "Listener") -> None:
        self._listeners.pop(listener, None)
        self.on_delivery()

    def record(
        self, kind: Kind, task: str = "", name: str = "", count: int = 1, seconds: float = 0.0, detail: str = ""
    ) -> None:
        with self._lock:
            self._ring.append((time.time(), kind, task, name, count, seconds, detail))
            self._recorded += 1

    def since(self, number: int) -> tuple[list[Event], int, int]:
        """Returns the events from a number on, the number to continue with, and the count of events dropped before.

        The number comes from an earlier call, or is 0 for all kept events, or `recorded` for future events only.
        """
        with self._lock:
            end = self._recorded
            first = end - len(self._ring)
            latest = list(itertools.islice(reversed(self._ring), max(0, end - max(number, first))))
        return [Event(*fields) for fields in reversed(latest)], end, max(0, first - number)


class Listener:
    """A thread that calls `callback` with new events, in order, until `close`, and then calls `finish`.

    Each call gets at least one event, and the number of events that were dropped since the last call.
    """

    def __init__(
        self,
        events: EventStream,
        callback: Callable[[list[Event], int], object],
        name: str = "coordinator-events",
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        self._events = events
        self._callback = callback
        self._next = self._delivered = events.recorded
        self._wakeup = threading.Event()
        self._finish = finish
        self._thread = BackgroundThread(name, self._listen, finish=self._end)
        events.add(self)
        self._thread.start()

    @property
    def thread(self) -> threading.Thread:
        return self._thread.thread

    def deliver(self, number: int) -> bool:
        """Returns whether the callback has returned for all events before `number`; if not, hastens that."""
        if self._delivered >= number or self not in self._events.listeners():
            return True
        self._wakeup.set()
        return False

    def close(self, timeout: float | None = None) -> None:
        """Delivers all recorded events and ends the thread. A second call does nothing."""
        self._thread.stop()
        self._wakeup.set()
        if self._thread.thread is threading.current_thread():
            return
        if not self._thread.wait_stopped(timeout):
            _logger.warning("A callback for events has not returned for %g s; its thread is left behind.", timeout)

    def _listen(self) -> None:
        is_last = False
        while not is_last:
            self._wakeup.wait(_INTERVAL)
            self._wakeup.clear()
            is_last = self._thread.stopping.is_set()
            events, self._next, dropped = self._events.since(self._next)
            try:
                if events:
                    self._callback(events, dropped)
            except BaseException:
                _logger.exception("A callback for events raised an error; it is called again for those that follow.")
            self._delivered = self._next
            self._events.on_delivery()

    def _end(self) -> None:
        try:
            self._finish()
        finally:
            self._events.remove(self)

    def __str__(self) -> str:
        return f"the callbacks for events on {self.thread.name}"


def task_of_device(device: str) -> str:
    """Returns the task of an event: `ps 1` for the device or task `/job:ps/replica:0/task:1`."""
    parts = dict(part.split(":", 1) for part in device.split("/") if ":" in part)
    return f"{parts.get('job', device)} {parts.get('task', '')}".strip()


_events_logger = logging.getLogger("coordinator.events")

# Every call has events of these kinds, which are therefore not logged.
_FREQUENT = ("closures_started", "closures_finished")


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object with `time`, `level` and `message`, and the fields of an event."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns one line."""
        event: Event | None = getattr(record, "event", None)
        fields = {} if event is None else dataclasses.asdict(event)
        seconds = fields.get("time", record.created)
        fields["time"] = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat(
            timespec="milliseconds"
        )
        line = {**fields, "level": record.levelname, "thread": record.threadName, "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


@contextlib.contextmanager
def log_written_as(log_format: Literal["text", "json"]) -> Iterator[None]:
    """A scope that writes records of the logger `coordinator` to standard error as JSON, not to the root's handlers."""
    if log_format == "text":
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    before = _logger.propagate, _events_logger.level
    _logger.addHandler(handler)
    _logger.propagate = False
    if _events_logger.level == logging.NOTSET:
        _events_logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        _logger.removeHandler(handler)
        _logger.propagate = before[0]
        _events_logger.setLevel(before[1])


def log_event(event: Event) -> None:
    """Logs an event at the level INFO, except the kinds of events that every call has."""
    if event.kind not in _FREQUENT:
        words = (event.kind, event.task, event.name, event.detail)
        _events_logger.info("%s", " ".join(filter(None, words)), extra={"event": event})
