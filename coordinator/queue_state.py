"""What a queue of closures knows: who waits, what runs, what was decided, and which error is to be raised.

A plain data structure without a lock or a thread; `ClosureQueue` guards it, tells futures and wakes those who wait.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence

from coordinator.queueing.closure import Attempt, Closure, ClosureState
from coordinator.runtime import Cancellation
from coordinator.statistics import ClusterStatistics
from coordinator.waiting_lines import WaitingLines


class QueueState:
    """The state of a `ClosureQueue`.

    Attributes:
      lines: the closures that wait.
      running: the attempts under way.
      unsettled: how many scheduled closures have no outcome yet, or were cancelled and still run.
      error: the pending error, which has withdrawn everything.
      late_error: an error that is to be raised once everything is settled.
      held: why nothing may be taken; empty if it may.
      dismissed: the workers that may take nothing any more.
      stopped: whether nobody may.
      retried: how many attempts were handed back.
    """

    def __init__(self) -> None:
        self.lines = WaitingLines()
        self.running: dict[Attempt, None] = {}
        self.unsettled = 0
        self.error: BaseException | None = None
        self.late_error: BaseException | None = None
        self.held = ""
        self.dismissed: set[int] = set()
        self.stopped = False
        self.retried = 0
        self._ended: Counter[ClosureState] = Counter()

    @property
    def is_settled(self) -> bool:
        """Whether every scheduled closure has its outcome."""
        return self.unsettled == 0

    @property
    def progress(self) -> tuple[int, ...]:
        """A value that changes whenever something moves."""
        return (*self._ended.values(), self.retried)

    def admit(self, closure: Closure) -> None:
        """A closure was scheduled."""
        self.lines.append(closure)
        if not closure.is_internal:
            closure.counts = True
            self.unsettled += 1

    def is_over_for(self, worker: int) -> bool:
        """Whether a worker may take nothing ever more."""
        return self.stopped or worker in self.dismissed

    def may_take(self, worker: int) -> bool:
        """Whether there is something that a worker may take now."""
        return not self.held and self.lines.has_next(worker) and not self.is_over_for(worker)

    @property
    def may_hand_out(self) -> bool:
        """Whether there is something that any worker may take now."""
        return not self.held and self.lines.has_for_all

    def start_next(self, worker: int, cancellation: Cancellation) -> Attempt:
        """A worker takes the next closure."""
        attempt = self.lines.pop_next(worker).start(worker, cancellation)
        self.running[attempt] = None
        return attempt

    def start_with(self, attempt: Attempt, cancellations: Sequence[Cancellation]) -> list[Attempt]:
        """The worker of an attempt takes the next closures of the common line too: one for each cancellation."""
        attempt.cancellation = cancellations[0]
        attempts = [attempt]
        for cancellation in cancellations[1:]:
            other = self.lines.pop_for_all().start(attempt.worker, cancellation)
            other.call_cancellation = attempt.call_cancellation
            self.running[other] = None
            attempts.append(other)
        return attempts

    def is_unwanted(self, closure: Closure) -> bool:
        """Whether a closure without an outcome must not be tried again."""
        return self.stopped or (self.error is not None and not closure.is_internal)

    def put_back(self, closure: Closure) -> None:
        """A closure whose last attempt came to nothing is the next to be taken."""
        self.lines.discard(closure)
        closure.hand_back()
        self.lines.push_front(closure)
        self.retried += 1

    def overrun(self) -> list[Closure]:
        """The closures whose latest attempt has overrun its time, and that are not to be tried again already."""
        now = time.monotonic()
        return [
            closure
            for closure, started in [
                (attempt.closure, attempt.started) for attempt in self.running if attempt.is_latest
            ]
            if closure.timeout is not None
            and now - started > closure.timeout
            and not (closure.has_ended or self.is_unwanted(closure) or closure.is_in_line)
        ]

    def decide(self, closure: Closure, state: ClosureState) -> bool:
        """A closure has its outcome, and must not wait any more; whether it did."""
        has_waited = self.lines.discard(closure)
        closure.end(state)
        self._ended[state] += 1
        return has_waited

    def withdraw(self, is_meant: Callable[[Closure], bool]) -> list[Closure]:
        """Takes closures out of the lines; those that do not run at the same time are cancelled, and returned."""
        meant = [closure for closure in self.lines if is_meant(closure)]
        for closure in meant:
            if closure.live:
                self.lines.discard(closure)
            else:
                self.decide(closure, ClosureState.CANCELLED)
        return [closure for closure in meant if closure.has_ended]

    def leave(self, attempt: Attempt) -> None:
        """An attempt is over."""
        del self.running[attempt]
        attempt.closure.leave(attempt)
        self.uncount(attempt.closure)

    def uncount(self, closure: Closure) -> None:
        """A closure counts no more once it has its outcome and was told so; a cancelled one when it runs no more."""
        is_over = closure.has_ended and closure.future.done()
        if closure.counts and is_over and not (closure.state is ClosureState.CANCELLED and closure.live):
            closure.counts = False
            self.unsettled -= 1

    def take_error(self) -> BaseException | None:
        """The error to be raised now, once."""
        error = self.error or self.late_error
        self.error = self.late_error = None
        return error

    def statistics(self) -> ClusterStatistics:
        """The counts, without the workers'."""
        return ClusterStatistics(
            waiting=len(self.lines),
            running=len({attempt.closure for attempt in self.running if attempt.closure.counts}),
            finished=self._ended[ClosureState.DONE],
            failed=self._ended[ClosureState.FAILED],
            cancelled=self._ended[ClosureState.CANCELLED],
            retried=self.retried,
        )

    def describe(self) -> str:
        """Words for what there is to be waited for."""
        now = time.monotonic()
        shown = [
            f"{attempt.closure} on worker {attempt.worker} for {now - attempt.started:.1f} s (attempt {attempt.number})"
            for attempt in list(self.running)[:10]
        ]
        more = len(self.running) - len(shown)
        running = ", ".join(shown) + (f" and {more} more" if more > 0 else "") if shown else "nothing"
        held = f"; nothing is run because {self.held}" if self.held else ""
        return f"{len(self.lines)} closures wait, running: {running}{held}"
