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
      requeued: the attempt whose closure waits again, if one does.
      reason: why.
    """

    outcomes: list[tuple[Closure, Any]] = dataclasses.field(default_factory=list)
    cancelled: Sequence[Attempt] = ()
    requeued: Attempt | None = None
    reason: str = ""

    def record(self, events: EventStream, ended: Sequence[Attempt]) -> None:
        """Records what was decided.

        Args:
          events: where.
          ended: the attempts of the call that has ended with it, if one has.
        """
        if self.requeued is not None:
            _record_end(events, "closures_retried", self.requeued, 1, self.reason)
        others = self.outcomes
        if not others:
            return
        first, value = others[0]
        if first.state is ClosureState.DONE:
            _record_end(events, "closures_finished", ended[0], len(others), "")
            return
        if ended:
            # The others were decided by what this one has ended with.
            _record_end(events, _KINDS[first.state.value], ended[0], 1, type(value).__name__)
            others = others[1:]
        for (kind, name), count in Counter((closure.state.value, closure.name) for closure, _ in others).items():
            events.record(_KINDS[kind], name=name, count=count)


def _record_end(events: EventStream, kind: Kind, attempt: Attempt, count: int, detail: str) -> None:
    seconds = time.monotonic() - attempt.started
    events.record(kind, f"worker {attempt.worker}", attempt.closure.name, count, seconds, detail)
