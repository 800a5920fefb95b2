"""Which events the timeline shows, and in what words."""

import dataclasses
import pathlib
from collections import deque
from collections.abc import Callable

from coordinator.dashboard.snapshot import TimelineEntry
from coordinator.events.event_stream import Event

_MOST_ENTRIES = 200
# Of an error's message, which may be long.
_LONGEST_DETAIL = 300


def _after(event: Event) -> str:
    return f" after {event.seconds:.1f} s" if event.seconds else ""


def _detail(event: Event) -> str:
    return f": {event.detail[:_LONGEST_DETAIL]}" if event.detail else ""


def _on(event: Event) -> str:
    return f" on {event.task}" if event.task else ""


def _recovered(event: Event) -> str:
    source = f" from {pathlib.PurePath(event.name).name}" if event.name else ""
    return f"The parameter servers are back{_after(event)}{source}, {event.count:,} steps lost"


# The level of each kind, and what is said.
_WORDS: dict[str, tuple[str, Callable[[Event], str]]] = {
    "worker_lost": ("error", lambda event: f"{event.task} was lost{_detail(event)}"),
    "worker_returned": ("good", lambda event: f"{event.task} is connected{_after(event)}"),
    "worker_joined": ("good", lambda event: f"{event.task} joined{_detail(event)}"),
    "worker_left": ("info", lambda event: f"{event.task} left{_detail(event)}"),
    # Its detail is the whole message of an error.
    "parameter_server_lost": ("error", lambda event: f"{event.task} was lost"),
    "parameter_server_recovered": ("good", _recovered),
    "checkpoint_saved": (
        "info",
        lambda event: f"Checkpoint {pathlib.PurePath(event.name).name} saved in {event.seconds:.1f} s",
    ),
    "checkpoint_failed": (
        "error",
        lambda event: f"Checkpoint {pathlib.PurePath(event.name).name} failed{_detail(event)}",
    ),
    "function_quarantined": ("error", lambda event: f"{event.name} is quarantined{_detail(event)}"),
    "thread_failed": ("error", lambda event: f"The thread {event.name} met an error and goes on{_detail(event)}"),
    "rule_changed": ("info", lambda event: f"The update rule has changed{_detail(event)}"),
    "closures_failed": ("warning", lambda event: f"{event.name} failed{_on(event)}{_detail(event)}"),
}


class Timeline:
    """The latest things that happened, other than that closures run."""

    def __init__(self) -> None:
        self._entries: deque[TimelineEntry] = deque(maxlen=_MOST_ENTRIES)
        self._number = 0

    def add(self, event: Event) -> None:
        """Adds an event, if it is of a kind that is shown."""
        if event.kind not in _WORDS:
            return
        level, words = _WORDS[event.kind]
        self._append(event.time, event.kind, level, event.task, words(event))

    def add_gap(self, time: float, dropped: int) -> None:
        """Adds that events were dropped because they came faster than they were read."""
        self._append(time, "events_dropped", "info", "", f"{dropped:,} events were not read in time")

    def entries(self) -> tuple[TimelineEntry, ...]:
        """Returns them, in order."""
        return tuple(self._entries)

    def _append(self, time: float, kind: str, level: str, task: str, text: str) -> None:
        last = self._entries[-1] if self._entries else None
        self._number += 1
        if last is not None and (last.kind, last.text) == (kind, text):
            # Repeated failures of one function would push all else out of the timeline.
            self._entries[-1] = dataclasses.replace(last, time=time)
        else:
            self._entries.append(TimelineEntry(self._number, time, kind, level, task, text))
