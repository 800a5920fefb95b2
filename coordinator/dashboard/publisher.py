"""Gives each snapshot to all readers, and knows whether there are any."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from coordinator.dashboard.snapshot import Snapshot

# A reader that has asked in this time, in seconds, counts: Prometheus asks every 15 s or every minute.
_WATCH_TIME = 75.0


class Publisher:
    """Has the latest snapshot.

    Args:
      first: is served until another one is published.
    """

    def __init__(self, first: Snapshot) -> None:
        self._changed = threading.Condition()
        self._snapshot = first
        self._number = 0
        # The latest snapshot without what the one before it had.
        self._increment = ""
        self._streams = 0
        self._asked_at = -_WATCH_TIME
        self._is_closed = False

    @property
    def is_watched(self) -> bool:
        """Whether a stream is open, or a snapshot was read in the last 75 s."""
        return self._streams > 0 or time.monotonic() < self._asked_at + _WATCH_TIME

    def publish(self, snapshot: Snapshot) -> None:
        """Replaces the snapshot."""
        increment = _message(state_of(snapshot, self._snapshot.time)) if self._streams else ""
        with self._changed:
            self._snapshot, self._increment = snapshot, increment
            self._number += 1
            self._changed.notify_all()

    def watch(self) -> Snapshot:
        """Returns the latest snapshot."""
        self._asked_at = time.monotonic()
        return self._snapshot

    def messages(self, interval: float) -> Iterator[str]:
        """Returns server-sent events: all of the latest snapshot, then what is new in each, until `close`.

        Args:
          interval: after this time without a snapshot, in seconds, there is an empty message.
        """
        with self._changed:
            self._streams += 1
            number, snapshot = self._number, self._snapshot
        try:
            yield _message(state_of(snapshot))
            while not self._is_closed:
                with self._changed:
                    if self._number == number and not self._is_closed:
                        self._changed.wait(interval)
                    missed = self._number - number
                    number, snapshot, increment = self._number, self._snapshot, self._increment
                if missed == 1 and increment:
                    yield increment
                elif missed:
                    yield _message(state_of(snapshot))
                elif not self._is_closed:
                    yield ":\n\n"
            yield "event: end\ndata: \n\n"
        finally:
            with self._changed:
                self._streams -= 1

    def close(self) -> None:
        """Ends all streams."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def state_of(snapshot: Snapshot, since: float = 0.0) -> str:
    """Returns a snapshot as JSON.

    Args:
      snapshot: is encoded with the names of its attributes; a segment of the stream as a list of its values, advice as
        its sentence.
      since: leaves out the segments that ended before.
    """
    stream = [_rounded(vars(segment)) for segment in snapshot.stream if segment.end >= since]
    fields = {**vars(snapshot), "stream": stream, "advice": snapshot.advice.text if snapshot.advice else ""}
    return json.dumps(fields, default=vars, separators=(",", ":"), allow_nan=False)


def target_of(snapshot: Snapshot) -> str:
    """Returns how many workers to have, as JSON: a `ScaleAdvice`, or `null` before enough was measured."""
    return json.dumps(snapshot.advice, default=vars, allow_nan=False)


def _rounded(segment: dict[str, Any]) -> list[Any]:
    return [round(value, 3) if isinstance(value, float) else value for value in segment.values()]


def _message(state: str) -> str:
    return f"data: {state}\n\n"
