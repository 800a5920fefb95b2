"""The outcome of a fault: seconds until the next useful step, an error, or nothing; and summaries of many outcomes.

A summary hides no repeat: it has the number of those that raised and of those that hung.
"""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

# How long after an error a client may still finish a useful step, in seconds.
PATIENCE = 10.0


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that a client reported.

    Attributes:
      kind: `ready` (its functions exist), `step` (a step has a result), `held` (the held function has a result),
        `joined` (`join` returned), `raised` (something raised an error), or `ended` (the process ended).
      at: when the client reported it, in seconds since the epoch.
      began: when the function began on its worker, on the same clock.
      worker: the index of that worker.
      error: the error, or how the client ended.
    """

    kind: str
    at: float
    began: float | None = None
    worker: int | None = None
    error: str | None = None

    @property
    def is_error(self) -> bool:
        """True for an error and for the end of the client."""
        return self.kind in ("raised", "ended")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one fault.

    Attributes:
      seconds: until the event that was waited for; None if it did not come.
      error: the name of the first error that the user's program saw meanwhile, such as that of a lost result, or None.
        Without seconds, the program did not recover from it.
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
    """Returns the outcome of a fault, or None while it is open.

    Args:
      events: all events of the client so far, in order.
      is_wanted: returns True for the event that is waited for.
      hurt_at: when the fault began; earlier errors do not count.
      since: what the seconds count from; 0 seconds if the event came before.
      now: the time. All times are in seconds since the epoch.
      limit: how long to wait, in seconds.
    """
    error = next((event for event in events if event.is_error and event.at >= hurt_at), None)
    wanted = next(filter(is_wanted, events), None)
    if wanted is not None:
        is_before = error is not None and error.at <= wanted.at
        return Outcome(max(0.0, wanted.at - since), error.error if error is not None and is_before else None)
    # One result may be lost, and its error raised, while other workers continue: the client has not failed then.
    if error is not None and not any(event.began is not None and event.began > error.at for event in events):
        return Outcome(error=error.error) if now >= max(since, error.at) + PATIENCE else None
    return Outcome() if now >= since + limit else None


def summary(outcomes: Sequence[Outcome], limit: float) -> str:
    """Describes repeats of one fault: the median where all finished a step, otherwise the number of each outcome.

    Args:
      outcomes: those of the repeats, at least one.
      limit: the timeout of each, in seconds.
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
    """Returns the median seconds of those that finished a step, or None."""
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    return statistics.median(seconds) if seconds else None


def ratio(ours: Sequence[Outcome], peer: Sequence[Outcome], limit: float) -> str:
    """Returns the ratio of the peer's median to ours; a lower bound if the peer always hung until `limit` seconds."""
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
