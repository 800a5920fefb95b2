"""What is to be done without the queue's lock after an event in the queue."""

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from coordinator.events.event_stream import EventStream, Kind
from coordinator.queueing.closure import Attempt, Closure, ClosureState

_KINDS: dict[str, Kind] = {
    ClosureState.DONE.value: "closures_finished",
    ClosureState.FAILED.value: "closures_failed",
    ClosureState.CANCELLED.value: "closures_cancelled",
}


@dataclasses.dataclass(slots=True)
class Effects:
    """What is to be done.

    Attributes:
      outcomes: the closures that were decided, in the order in which their futures are to be set, each with its result,
        or its error, or None if its user cancelled it.
      cancelled: the attempts to be cancelled.
      ended: the attempt that has ended without a result, if one has.
      is_requeued: whether its closure waits again.
      reason: why.
    """

    outcomes: list[tuple[Closure, Any]] = dataclasses.field(default_factory=list)
    cancelled: Sequence[Attempt] = ()
    ended: Attempt | None = None
    is_requeued: bool = False
    reason: str = ""

    def record(self, events: EventStream, call: Sequence[Attempt]) -> None:
        """Records what was decided, and the end of a call.

        Args:
          events: where.
          call: the attempts of the call that has ended with it, if one has.
        """
        attempt, others = call[0] if call else self.ended, self.outcomes
        if attempt is not None:
            count = attempt.closure.runs
            if self.is_requeued:
                kind: Kind = "closures_retried"
            elif others and others[0][0].state is ClosureState.DONE:
                kind, count, others = "closures_finished", sum(each.runs for each, _ in others), []
            elif others and others[0][0] is attempt.closure:
                kind, self.reason = _KINDS[others[0][0].state.value], type(others[0][1]).__name__
                others = others[1:]
            else:
                # What it ran was decided before.
                kind, count = "closures_cancelled", 0
            seconds = time.monotonic() - attempt.started
            events.record(kind, f"worker {attempt.worker}", attempt.closure.name, count, seconds, self.reason)
        if others:
            counts: Counter[tuple[Kind, str]] = Counter()
            for each, _ in others:
                counts[_KINDS[each.state.value], each.name] += each.runs
            for (kind, name), count in counts.items():
                events.record(kind, name=name, count=count)
