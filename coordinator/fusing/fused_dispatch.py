"""Which closures a worker runs in one call: the one that it took, and those with an equal key right behind it.

    waiting   a1 a2 a3 a4 b1 a5 ...      a: closures with equal fusion keys; two workers are live
    worker 0  [a1 a2]                    its fair share, as far as the size model says that fusing pays
    worker 1  [a3 a4]

Guarantees:
- A call never waits for closures that are not there yet.
- No worker takes more than a fair share of what waits, so that workers stay balanced.
- No worker builds a call with closures in hand: it makes calls of the sizes that are ready, and asks for others.
- A closure that was tried before runs alone. So a closure that kills its worker, or raises an error, is distinguished
  from those that ran in the same call.

Of a closure of many runs a worker makes as many as are worth one call, likewise; the others go on waiting.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from coordinator.fusing.fusion_size import FusionSizeModel
from coordinator.options import Options
from coordinator.queueing.closure import Attempt
from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.runtime import FailureKind, Runtime

# Beyond this number of closures in a call the client is the bottleneck. Does not apply to runs of one closure.
_MAX_CLOSURES = 64


class FusedDispatch:
    """Gathers and runs the closures of one worker's calls. For the worker's thread only.

    Args:
      worker: the worker's index.
      runtime: runs calls.
      queue: has the closures that wait.
      options: `steps_per_dispatch`, `max_attempts`, `transient_retries`.
      live_workers: returns how many workers share what waits.
    """

    def __init__(
        self, worker: int, runtime: Runtime, queue: ClosureQueue, options: Options, live_workers: Callable[[], int]
    ) -> None:
        self._worker = worker
        self._runtime = runtime
        self._queue = queue
        self._limit = options.steps_per_dispatch
        self._live_workers = live_workers
        # The loss of a fused call counts as a failed attempt of each of its closures. It must not bring one to its
        # limit, so calls are fused only if the limits allow a second attempt.
        self._is_allowed = self._limit != 1 and options.max_attempts > 1 and options.transient_retries > 0
        self._model = FusionSizeModel(self._limit)
        # The function of the latest call, if its duration is to be recorded.
        self._function: Hashable | None = None
        # How many closures, or runs of one closure, the call has that was gathered last.
        self._count = 1

    def reset(self) -> None:
        """Notes that the worker is another process now."""
        self._model.restart()

    def gather(self, attempt: Attempt) -> list[Attempt]:
        """Returns the attempts to run in one call, `attempt` the first of them."""
        self._count = 1
        most = self._most(attempt)
        if attempt.closure.whole is not None:
            self._gather_runs(attempt, most)
            return [attempt]
        most = min(most, self._limit or _MAX_CLOSURES)
        if most < 2:
            return [attempt]
        function, ready = self._function, self._ready(attempt)
        waiting = 1 + self._queue.workers.waiting_with(attempt.closure)
        share = min(_share(waiting, self._live_workers()), most)
        limit = self._model.steps(function, share, ready)
        wanted = self._model.wanted(function, share)
        if ready is not None and wanted > limit:
            like = self._queue.workers.work_like(attempt.closure)
            if like is not None:
                self._runtime.prepare(self._worker, attempt.work, like, wanted)
        if limit == 1:
            return [attempt]
        # The queue's lock is held while the model is asked.
        attempts = self._queue.take_batch(
            attempt, limit, lambda available: self._model.steps(function, available, ready)
        )
        self._count = len(attempts)
        return attempts

    def _gather_runs(self, attempt: Attempt, most: int) -> None:
        """Decides how many runs of a closure of many are made in the call, and leaves the others to all workers."""
        function, workers = self._function, self._live_workers()
        if function is None:
            self._count = self._queue.runs.begin(attempt, lambda _: 1)
            return
        ready = self._ready(attempt)

        def possible(available: int) -> int:
            share = available if attempt.closure.target is not None else _share(available, workers)
            return min(share + self._model.beyond_share(function), available, most)

        wanted = self._model.wanted(function, possible(self._queue.runs.available(attempt)))
        if ready is not None and wanted > 1 and wanted not in ready:
            self._runtime.prepare(self._worker, attempt.work, attempt.work, wanted)
        self._count = self._queue.runs.begin(
            attempt, lambda available: self._model.steps(function, possible(available), ready)
        )

    def _ready(self, attempt: Attempt) -> Mapping[int, float] | None:
        """Returns the sizes that are ready, None for all: a size that the user has set is built when it is needed."""
        if self._limit is not None:
            return None
        ready = self._runtime.ready(self._worker, attempt.work)
        if ready is not None:
            self._model.note_ready(self._function, ready)
        return ready

    def run(self, attempts: Sequence[Attempt]) -> Sequence[Any]:
        """Runs the attempts that were gathered last; returns their results. Raises what the runtime raises."""
        first, count = attempts[0], self._count
        start = self._record_start(first, count)
        results = self._run_gathered(attempts, count)
        if self._function is not None:
            self._model.record(self._function, count, time.monotonic() - start)
        return results

    def _run_gathered(self, attempts: Sequence[Attempt], count: int) -> Sequence[Any]:
        first = attempts[0]
        if first.closure.whole is not None:
            return (self._runtime.run_steps(self._worker, first.work, count, first.cancellation),)
        if count == 1:
            return (self._runtime.run(self._worker, first.work, first.cancellation),)
        works = [attempt.work for attempt in attempts]
        return self._runtime.run_fused(self._worker, works, first.call_cancellation)

    def _most(self, attempt: Attempt) -> int:
        """Returns how many runs of a closure's function may be in one call; keeps the function if several may."""
        key = attempt.closure.fusion_key
        most = 1 if key is None or not self._is_allowed else self._runtime.most_fused(self._worker, attempt.work)
        self._function = key.function if key is not None and most > 1 else None
        return most

    def _record_start(self, first: Attempt, count: int) -> float:
        """Records that a call of `count` runs starts; returns when, in seconds of the `time.monotonic` clock."""
        closure = first.closure
        waited = first.started - closure.waiting_since
        self._queue.events.record("closures_started", f"worker {self._worker}", closure.name, count, waited)
        return time.monotonic()

    def record_failure(self, kind: FailureKind) -> None:
        """Records that the latest call, of several closures, failed."""
        if self._function is not None and kind in (FailureKind.USER, FailureKind.INPUT, FailureKind.END_OF_DATA):
            self._model.record_error(self._function)


def _share(waiting: int, workers: int) -> int:
    """Returns the fair share of one of the workers of what waits."""
    return -(-waiting // max(workers, 1))
