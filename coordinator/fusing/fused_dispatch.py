"""Which closures a worker runs in one call: the one that it has taken, and those like it that wait right behind.

    waiting   a1 a2 a3 a4 b1 a5 ...      a: closures that are alike; two workers are live
    worker 0  [a1 a2]                    its fair share, as far as the pace says that it pays
    worker 1  [a3 a4]

Promises:
- Nothing is waited for: what is not there is not in the call.
- Nobody takes more than a fair share of what waits, so that workers stay balanced.
- A closure that was tried before runs alone. So what was lost with its worker is told from its innocent neighbours, and
  an error from those that only ran in the same call.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from coordinator.closure_queue import ClosureQueue
from coordinator.options import Options
from coordinator.pace import Pace
from coordinator.queueing.closure import Attempt
from coordinator.runtime import FailureKind, Likeness, Runtime


class FusedDispatch:
    """Gathers and runs the closures of one worker's calls. For the worker's thread alone.

    Args:
      worker: its index.
      runtime: says which closures are alike, and runs them.
      queue: has those that wait.
      options: `steps_per_dispatch`.
      live_workers: tells how many workers share what waits.
    """

    def __init__(
        self, worker: int, runtime: Runtime, queue: ClosureQueue, options: Options, live_workers: Callable[[], int]
    ) -> None:
        self._worker = worker
        self._runtime = runtime
        self._queue = queue
        self._most = options.steps_per_dispatch
        self._live_workers = live_workers
        # All that run in a lost call are charged with the loss. None of them may be at its limit by that.
        self._is_allowed = self._most != 1 and options.max_attempts > 1 and options.transient_retries > 0
        self._pace = Pace(self._most)
        # What is noted for the pace of it; None if the call has none.
        self._function: Hashable | None = None

    def begin_anew(self) -> None:
        """The worker is another one now: nothing is made there."""
        self._pace = Pace(self._most)

    def gather(self, attempt: Attempt) -> list[Attempt]:
        """The attempts that are to be made in one call with `attempt`, itself the first of them."""
        likeness = self._likeness(attempt.work) if self._is_allowed and attempt.may_be_fused else None
        self._function = None if likeness is None else likeness.function
        if likeness is None:
            return [attempt]
        waiting = 1 + self._queue.waiting_for_all
        share = -(-waiting // max(self._live_workers(), 1))
        most = self._pace.steps(likeness.function, share)
        if most == 1:
            return [attempt]
        return self._queue.take_alike(
            attempt,
            most,
            lambda work: self._likeness(work) == likeness,
            lambda available: self._pace.steps(likeness.function, available),
        )

    def run(self, attempts: Sequence[Attempt]) -> Sequence[Any]:
        """Runs the attempts that were gathered last; their results, in order. Raises what the runtime raises."""
        first = attempts[0]
        began = time.monotonic()
        if len(attempts) == 1:
            results: Sequence[Any] = (self._runtime.run(self._worker, first.work, first.cancellation),)
        else:
            results = self._runtime.run_fused(
                self._worker, [attempt.work for attempt in attempts], first.call_cancellation
            )
        if self._function is not None:
            self._pace.note(self._function, len(attempts), time.monotonic() - began)
        return results

    def note_failure(self, kind: FailureKind) -> None:
        """The call that was run last, of several closures, failed."""
        if self._function is not None and kind in (FailureKind.USER, FailureKind.INPUT):
            self._pace.note_error(self._function)

    def _likeness(self, work: Any) -> Likeness | None:
        return self._runtime.likeness(self._worker, work)
