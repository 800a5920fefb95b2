"""A client process of the recovery benchmark: commands go in, events come out, and it can be killed at any time.

Waiting for an event ends in time or raises an error with the end of the client's log.
"""

import json
import pathlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.piped_process import PipedProcess
from benchmarks.recovery_outcome import Event, Outcome, judge

# Far more than a client needs to load TensorFlow, connect and run every function once, in seconds.
START_TIMEOUT = 240.0
_POLL_INTERVAL = 0.2


class ClientProcess(PipedProcess):
    """A running `benchmarks.recovery_client`.

    Args:
      side: `ours` or `peer`.
      spec: the addresses of each job.
      folder: an existing folder for checkpoints, the mark of the held function and the log. A second client in the same
        folder continues from the first one's checkpoint.
    """

    def __init__(self, side: str, spec: Mapping[str, Sequence[str]], folder: pathlib.Path) -> None:
        self._mark = folder / "mark"
        self._events: list[Event] = []
        # The process may report as soon as it has started.
        self._changed = threading.Condition()
        settings = {"spec": spec, "folder": str(folder / "checkpoints"), "mark": str(self._mark)}
        self.started_at = time.time()
        super().__init__(side, "benchmarks.recovery_client", side, json.dumps(settings), log=folder / "client.log")

    @property
    def events(self) -> tuple[Event, ...]:
        """The events so far."""
        with self._changed:
            return tuple(self._events)

    def wait_warm(self, workers: int) -> None:
        """Starts steps, and waits until each of the workers has finished one; the steps continue.

        Raises:
          RuntimeError: it did not happen in time; the message ends with the client's log.
        """
        self.send("feed")
        self._wait(lambda events: len({event.worker for event in events if event.kind == "step"}) == workers)

    def wait_held(self) -> int:
        """Schedules the function that does not end by itself, and returns the index of the worker that runs it.

        Raises:
          RuntimeError: no worker ran it in time.
        """
        self.send("hold")
        self._wait(lambda _: self._mark.exists() and self._mark.read_text())
        return int(self._mark.read_text())

    def wait_outcome(
        self, is_wanted: Callable[[Event], bool], *, hurt_at: float, since: float, limit: float
    ) -> Outcome:
        """Waits for an event, an error or the limit; see `judge`."""
        while True:
            with self._changed:
                outcome = judge(self._events, is_wanted, hurt_at=hurt_at, since=since, now=time.time(), limit=limit)
                if outcome is not None:
                    return outcome
                self._changed.wait(_POLL_INTERVAL)

    def __repr__(self) -> str:
        return f"{super().__repr__()}, {len(self._events)} events"

    def _wait(self, is_true: Callable[[Sequence[Event]], object]) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        with self._changed:
            while not is_true(self._events):
                failed = next((event for event in self._events if event.is_error), None)
                if failed is not None or time.monotonic() >= deadline:
                    raise RuntimeError(f"{self!r} did not get ready: {failed}. It printed:\n{self.tail()}")
                # The condition may be that a file exists.
                self._changed.wait(_POLL_INTERVAL / 10)

    def _on_message(self, message: dict[str, Any]) -> None:
        self._note(Event(**message))

    def _on_end(self, code: int) -> None:
        self._note(Event("ended", time.time(), error=f"an end of the client with code {code}"))

    def _note(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()
