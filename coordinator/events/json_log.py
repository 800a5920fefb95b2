"""The log as JSON: one object per line, for programs that collect logs; `Options(log_format="json")`."""

import contextlib
import dataclasses
import datetime
import json
import logging
from collections.abc import Iterator
from typing import Literal

from coordinator.events.event_stream import Event

_logger = logging.getLogger("coordinator")
_events_logger = logging.getLogger("coordinator.events")

# Each call has these.
_FREQUENT = ("closures_started", "closures_finished")


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object with `time`, `level` and `message`; that of an event also with its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns one line."""
        event: Event | None = getattr(record, "event", None)
        fields = {} if event is None else dataclasses.asdict(event)
        seconds = fields.get("time", record.created)
        fields["time"] = datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")
        line = {**fields, "level": record.levelname, "thread": record.threadName, "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


@contextlib.contextmanager
def log_written_as(log_format: Literal["text", "json"]) -> Iterator[None]:
    """Has the records of the logger `coordinator` written to standard error as JSON, and not to the root's handlers."""
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
    """Logs an event at the level INFO, unless each call has one of its kind."""
    if event.kind not in _FREQUENT:
        words = (event.kind, event.task, event.name, event.detail)
        _events_logger.info("%s", " ".join(filter(None, words)), extra={"event": event})
