"""What some workers did and when: what a picture of their days is drawn from."""

import dataclasses
import enum
import math

# More than a picture has room for.
_MOST_SPANS = 1000


class Activity(enum.Enum):
    """What a worker does with its time. Between these it communicates."""

    COMPUTE = "compute"
    WAIT = "wait"
    DEAD = "dead"


@dataclasses.dataclass(frozen=True)
class Span:
    """One activity of one worker; times in seconds."""

    activity: Activity
    start: float
    end: float


class Lane:
    """The first activities of one worker, in order.

    Args:
      worker: its index.
    """

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.spans: list[Span] = []

    @property
    def known_until(self) -> float:
        """Until when all that the worker did is here, in seconds; `inf` if to the end."""
        return self.spans[-1].end if len(self.spans) == _MOST_SPANS else math.inf

    def add(self, activity: Activity, start: float, end: float) -> None:
        """Notes what the worker does from a time to another, in seconds."""
        if end > start and len(self.spans) < _MOST_SPANS:
            self.spans.append(Span(activity, start, end))

    def cut(self, at: float) -> None:
        """What was to come after a time did not: the worker died."""
        self.spans = [
            span if span.end <= at else dataclasses.replace(span, end=at) for span in self.spans if span.start < at
        ]

    def __repr__(self) -> str:
        return f"<Lane of worker {self.worker}: {len(self.spans)} spans>"
