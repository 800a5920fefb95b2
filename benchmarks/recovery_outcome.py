"""What came of a fault: seconds until the next useful step, an error, or nothing at all; and many of them in words.

It promises that nothing is averaged away: a summary says how many of the repeats raised, and how many hung.
"""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

# How long after an error a client may still come to a useful step, in seconds.
PATIENCE = 10.0


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that a client told.

    Attributes:
      kind: `ready` (it has built its program), `step` (a step has a result), `held` (so has the function that was
        held up), `joined` (`join` returned), `raised` (something raised an error), or `ended` (it is no more).
      at: when the client knew of it, in seconds since the epoch.
      began: when the function began on its worker, on the same clock.
      worker: the index of that worker.
      error: what was raised, or how the client ended.
    """

    kind: str
    at: float
    began: float | None = None
    worker: int | None = None
    error: str | None = None

    @property
    def is_error(self) -> bool:
        """Whether something went wrong."""
        return self.kind in ("raised", "ended")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one fault, once.

    Attributes:
      seconds: until what was waited for; None if it did not come.
      error: the name of the first error that the user's program saw meanwhile, such as that of a lost result; None
        if there was none. Without seconds: nothing came of the program after it.
    """

    seconds: float | None = None
    error: str | None = None

    def __str__(self) -> str:
        if self.seconds is not None:
            return f"{self.seconds:.2f} s" + (f", raises {self.error}" if self.error else "")
        return f"raises {self.error}" if self.error else "hangs"


def judge(
    events: Sequence[Event],
    is_wanted: Callable[[Event], bool],
    *,
    hurt_at: float,
    since: float,
    now: float,
    limit: float,
) -> Outcome | None:
    """What came of a fault, or None while that is open.

    Args:
      events: all that the client told so far, in order.
      is_wanted: tells the event that is waited for.
      hurt_at: when the fault began; what was raised before is none of its doing.
      since: what the seconds count from. What was waited for may be there already: that took no time.
      now: the time. All times are in seconds since the epoch.
      limit: how long to wait, in seconds.
    """
    error = next((event for event in events if event.is_error and event.at >= hurt_at), None)
    wanted = next(filter(is_wanted, events), None)
    if wanted is not None:
        is_before = error is not None and error.at <= wanted.at
        return Outcome(max(0.0, wanted.at - since), error.error if error is not None and is_before else None)
    # One result may be lost, and its error raised, while other workers go on: then the client is not at its end.
    if error is not None and not any(event.began is not None and event.began > error.at for event in events):
        return Outcome(error=error.error) if now >= max(since, error.at) + PATIENCE else None
    return Outcome() if now >= since + limit else None


def summary(outcomes: Sequence[Outcome], limit: float) -> str:
    """Repeats of one fault in words: the median if each of them came to a step, otherwise how many did what.

    Args:
      outcomes: of the repeats, at least one.
      limit: how long each was waited for, in seconds.
    """
    middle = median(outcomes)
    kinds = Counter("" if outcome.seconds is not None else _failure(outcome, limit) for outcome in outcomes)
    errors = sorted({outcome.error for outcome in outcomes if outcome.seconds is not None and outcome.error})
    words = [] if middle is None else [f"{middle:.2f} s" + (f", raises {', '.join(errors)}" if errors else "")]
    for kind, count in kinds.items():
        if kind:
            words.append(kind if count == len(outcomes) else f"{count} of {len(outcomes)} {kind}")
    return "; ".join(words)


def median(outcomes: Sequence[Outcome]) -> float | None:
    """The median of the seconds of those that came to a step, or None."""
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    return statistics.median(seconds) if seconds else None


def ratio(ours: Sequence[Outcome], peer: Sequence[Outcome], limit: float) -> str:
    """How many times longer the peer took: of the medians, or at least that if it always hung until `limit` seconds."""
    own = median(ours)
    if own is None or not own or any(outcome.seconds is None for outcome in ours):
        return "-"
    if all(outcome.seconds is not None for outcome in peer):
        return f"{(median(peer) or 0.0) / own:.2f}"
    is_hung = all(outcome.seconds is None and outcome.error is None for outcome in peer)
    return f"> {limit / own:.0f}" if is_hung else "-"


def _failure(outcome: Outcome, limit: float) -> str:
    if outcome.error is None:
        return f"hangs (deadline {limit:g} s)"
    return f"raises {outcome.error}; restart the client"
