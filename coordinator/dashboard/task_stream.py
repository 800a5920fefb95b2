"""What each worker has run in the last minute, from the events of closures.

Calls of one function that follow each other closely are one segment, so that a thousand short calls a second are as
cheap to show as one long one. How long a worker was busy is counted exactly.
"""

import dataclasses
from collections import defaultdict, deque

from coordinator.dashboard.snapshot import Segment

# In seconds.
STREAM_LENGTH = 60.0
# The shortest break that is shown, in seconds: a tenth of a percent of the width; more with many workers, whose rows
# are a few pixels high.
_BREAK, _BREAK_OF_MANY = 0.06, 0.5
_MANY = 64


@dataclasses.dataclass
class _Worker:
    """What one worker runs, and its segments."""

    running: Segment | None = None
    busy: float = 0.0
    segments: deque[Segment] = dataclasses.field(default_factory=deque)


class TaskStream:
    """Collects when each worker was busy, and with what."""

    def __init__(self) -> None:
        self._workers: defaultdict[int, _Worker] = defaultdict(_Worker)

    def begin(self, worker: int, time: float, function: str, closures: int) -> None:
        """Records that a worker has begun a call."""
        self._workers[worker].running = Segment(worker, time, time, function, "running", closures)

    def end(self, worker: int, time: float, outcome: str) -> None:
        """Records that the call of a worker, if it runs one, has ended."""
        state = self._workers[worker]
        if state.running is None:
            return
        ended = dataclasses.replace(state.running, end=max(time, state.running.start), outcome=outcome)
        state.running = None
        state.busy += ended.end - ended.start
        last = state.segments[-1] if state.segments else None
        if last is not None and self._continues(last, ended):
            closures = last.closures + ended.closures
            state.segments[-1] = dataclasses.replace(last, end=ended.end, closures=closures)
        else:
            state.segments.append(ended)

    def running(self, worker: int) -> Segment | None:
        """Returns the call that a worker runs, if it runs one."""
        return self._workers[worker].running

    def busy_seconds(self, worker: int, now: float) -> float:
        """Returns for how long a worker was busy so far."""
        state = self._workers[worker]
        return state.busy + (max(0.0, now - state.running.start) if state.running else 0.0)

    def segments(self, now: float) -> tuple[Segment, ...]:
        """Returns the segments of the last minute, those of one worker in their order; forgets older ones."""
        shown: list[Segment] = []
        for _, state in sorted(self._workers.items()):
            while state.segments and state.segments[0].end < now - STREAM_LENGTH:
                state.segments.popleft()
            shown += state.segments
            if state.running is not None:
                shown.append(dataclasses.replace(state.running, end=max(now, state.running.start)))
        return tuple(shown)

    def _continues(self, last: Segment, ended: Segment) -> bool:
        shortest = _BREAK if len(self._workers) <= _MANY else _BREAK_OF_MANY
        is_same = (last.function, last.outcome) == (ended.function, ended.outcome)
        # No segment is longer than the stream, so that what is older can be forgotten.
        return is_same and ended.start - last.end < shortest and ended.end - last.start < STREAM_LENGTH / 10
