"""Decides which closures a worker runs in one call: the one that it took, and those with an equal key right behind it.

    waiting   a1 a2 a3 a4 b1 a5 ...      a: closures with equal fusion keys; two workers are live
    worker 0  [a1 a2]                    its fair share, if the size model says that fusing pays
    worker 1  [a3 a4]

A closure with many runs is split in the same way: the worker takes as many runs as pay in one call. The rest stay
queued.

Guarantees:
- A call never waits for closures that are not queued yet.
- No worker takes more than a fair share of what waits, so workers stay balanced.
- No worker builds a call while it holds closures: it makes calls of ready sizes, and requests others.
- A closure that was tried before runs alone, so one that kills its worker or raises an error is told from the others in
  its call. A function that failed in a call of several steps runs alone afterwards: the whole call had to run again.
- With `limit=None`, calls are fused only when measurements say that it pays, and only in sizes that are ready on the
  worker; with a limit, up to that many steps are always fused.

The size of a call is a pure decision on measured values. A call of k steps takes a + k * b seconds: a for the way to
the worker and back, b for each step. Both are learned from calls of one step and of k. The size makes a small compared
with k * b, but keeps the call short.

A call of a new size must be built (traced, sent to the worker, prepared there). Per step, that takes about as long as
building the function itself. So there are few sizes, and a larger one is built when it would already have saved a good
part of its building time, assuming that most of the training is still to come. `Builds` builds it in the background;
until then the worker makes calls of ready sizes.
"""

import dataclasses
import math
import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from coordinator.options import Options
from coordinator.queueing.closure import Attempt
from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.runtime import FailureKind, Runtime

# The maximum share of a call's time that its overhead may take.
_OVERHEAD = 0.025
# The maximum duration of a call of several steps, in seconds: all results arrive at its end.
_MAX_SECONDS = 0.4
_MAX_STEPS = 256
# A size is tried only after one that is at most this many times smaller.
_GROWTH = 4
# A size is built when this many times its savings so far equal its building time.
_FORESIGHT = 4
# One call in this many has another size, to keep the averages of both current.
_CALLS_PER_CHECK = 32
# The weight of the latest call in the average of its size, and the limit, in averages, to which its time counts.
_WEIGHT, _OUTLIER = 0.25, 4.0
# The maximum number of functions with known costs; the least recently used one is dropped.
_FUNCTIONS = 256


class FusionSizeModel:
    """The durations of each function's calls on one worker. For one thread.

    `limit` is the maximum number of steps in one call; None adapts it to their duration.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._costs: OrderedDict[Hashable, _FunctionCost] = OrderedDict()

    def restart(self) -> None:
        """Notes that the worker is a new process, in which no function has run; the times are kept."""
        for cost in self._costs.values():
            cost.has_begun = False

    def steps(self, function: Hashable, available: int, ready: Mapping[int, float] | None = None) -> int:
        """Returns how many of the available steps of a function the next call makes, at least one.

        `ready` maps the built sizes above 1 to their building times in seconds; None for any size.
        """
        wanted = self.wanted(function, available)
        if ready is None or wanted in ready:
            return wanted
        return max((size for size in ready if size <= wanted), default=1)

    def wanted(self, function: Hashable, available: int) -> int:
        """Returns the size of the next call if every size is ready."""
        cost = self._costs.get(function)
        if available < 2 or (cost is not None and cost.runs_alone):
            return 1
        if self._limit is not None:
            return self._limit if self._limit <= available else min(1 << (available.bit_length() - 1), self._limit)
        return 1 if cost is None else cost.next_size(available)

    def note_ready(self, function: Hashable, ready: Mapping[int, float]) -> None:
        """Notes the building times of ready sizes."""
        cost = self._costs.get(function)
        if cost is not None and ready:
            largest = max(ready)
            cost.building = ready[largest] / largest or cost.building

    def beyond_share(self, function: Hashable) -> int:
        """Returns how many steps beyond its share a worker may make in a call, in the time of one call's overhead.

        The last of many steps are therefore not made in ever smaller calls.
        """
        cost = self._costs.get(function)
        return 0 if cost is None or self._limit is not None else cost.steps_per_overhead()

    def record(self, function: Hashable, steps: int, seconds: float) -> None:
        """Records the duration of a successful call."""
        cost = self._costs.get(function) or self._new_cost(function)
        self._costs.move_to_end(function)
        cost.record(steps, seconds)

    def record_error(self, function: Hashable) -> None:
        """Records that a call of several steps failed with an error of its function."""
        cost = self._costs.get(function) or self._new_cost(function)
        cost.runs_alone = True

    def _new_cost(self, function: Hashable) -> "_FunctionCost":
        cost = self._costs[function] = _FunctionCost()
        if len(self._costs) > _FUNCTIONS:
            self._costs.popitem(last=False)
        return cost


@dataclasses.dataclass
class _FunctionCost:
    """The measured costs of one function.

    Attributes:
      runs_alone: whether it never shares a call.
      known: the sizes that have run, smallest first.
      has_begun: whether it has run in the worker's present process.
      average: size -> moving average of a call's seconds, without the first call in each process, which prepares it.
      latest: the last size above one that has run; 1 if none has.
      building: the building time of one more step, in seconds.
      wasted: the seconds that the size above the largest known one would have saved so far.
    """

    runs_alone: bool = False
    known: list[int] = dataclasses.field(default_factory=list)
    has_begun: bool = False
    average: dict[int, float] = dataclasses.field(default_factory=dict)
    latest: int = 1
    calls: int = 0
    building: float = 0.0
    wasted: float = 0.0

    def next_size(self, available: int) -> int:
        """Returns the size of the next call, built or not."""
        if 1 not in self.average or not self.has_begun:
            return 1
        wanted, _ = self._best()
        if self.latest > 1 and self.calls % _CALLS_PER_CHECK == 0:
            wanted = 1 if wanted > 1 else self.latest
        following = min(wanted, _GROWTH * self.known[-1])
        is_worth_it = _FORESIGHT * self.wasted >= following * self.building
        if self.known[-1] < following <= available and is_worth_it:
            return following
        limit = max(1, min(self._max_size(), available))
        possible = [size for size in self.known if size <= limit]
        # A known size above the wanted one costs no building time.
        return next((size for size in possible if size >= wanted), possible[-1])

    def record(self, steps: int, seconds: float) -> None:
        self.calls += 1
        if steps > 1:
            self.latest = steps
        if steps not in self.known:
            self.known = sorted([*self.known, steps])
            self.wasted = 0.0
        if not self.has_begun:
            self.has_begun = True
            # Half of the first call: it mostly waits for connections between servers.
            self.building = self.building or seconds / steps / 2
            return
        average = self.average.get(steps, seconds)
        self.average[steps] = average + _WEIGHT * (min(seconds, _OUTLIER * average) - average)
        if steps == self.known[-1] and 1 in self.average:
            best, overhead = self._best()
            following = min(best, _GROWTH * steps)
            if following > steps:
                self.wasted += overhead * (1 - steps / following)

    def steps_per_overhead(self) -> int:
        """Returns how many steps take as long as a call's overhead, at most as many as a call may have."""
        overhead, step = self._parts() if 1 in self.average else (0.0, 1.0)
        return int(min(overhead / step, _MAX_STEPS)) if step else _MAX_STEPS

    def _parts(self) -> tuple[float, float]:
        one = self.average[1]
        if self.latest not in self.average or self.latest == 1:
            return one, 0.0
        step = min(max(self.average[self.latest] - one, 0.0) / (self.latest - 1), one)
        return one - step, step

    def _best(self) -> tuple[int, float]:
        """Returns the best size, known or not, and the overhead of a call, in seconds."""
        if self.latest == 1:
            return (_GROWTH if _GROWTH * self.average[1] <= _MAX_SECONDS else 1), self.average[1]
        overhead, step = self._parts()
        if self.latest not in self.average:
            return self.latest, overhead
        # Rounded up to keep the overhead within its limit, unless the call would be too long.
        size = 1
        while size < _MAX_STEPS and size * step * _OVERHEAD < overhead * (1 - _OVERHEAD):
            size *= 2
        limit = self._max_size()
        while size > 1 and size > limit:
            size //= 2
        return size, overhead

    def _max_size(self) -> float:
        overhead, step = self._parts()
        return (_MAX_SECONDS - overhead) / step if step else math.inf


# Above this number of closures in a call the client is the bottleneck. Does not apply to runs of one closure.
_MAX_CLOSURES = 64


class FusedDispatch:
    """Gathers and runs the closures of one worker's calls. For the worker's thread only."""

    def __init__(self, worker: int, runtime: Runtime, queue: ClosureQueue, options: Options) -> None:
        self._worker = worker
        self._task = f"worker {worker}"
        self._runtime = runtime
        self._queue = queue
        self._limit = options.steps_per_dispatch
        # The loss of a fused call counts as a failed attempt of each of its closures. It must not bring one to its
        # limit, so calls are fused only if the limits allow a second attempt.
        self._is_allowed = self._limit != 1 and options.max_attempts > 1 and options.transient_retries > 0
        self._model = FusionSizeModel(self._limit)
        # The function of the latest call, if its duration is recorded.
        self._function: Hashable | None = None
        # Size of the last gathered call, in closures or in runs of one closure.
        self._count = 1

    def reset(self) -> None:
        """Notes that the worker is a new process, in which no function has run."""
        self._model.restart()

    def gather(self, attempt: Attempt) -> list[Attempt]:
        """Returns the attempts to run in one call, `attempt` first."""
        self._count = 1
        closure = attempt.closure
        key = closure.fusion_key if self._is_allowed else None
        self._function = None if key is None else key.function
        if closure.whole is not None:
            self._gather_runs(attempt)
            return [attempt]
        if key is None:
            return [attempt]
        share = self._queue.share_with(closure)
        if share < 2:
            return [attempt]
        most = min(self._runtime.most_fused(self._worker, attempt.work), self._limit or _MAX_CLOSURES)
        if most < 2:
            self._function = None
            return [attempt]
        share = min(share, most)
        function, ready = self._function, self._ready(attempt)
        limit = self._model.steps(function, share, ready)
        wanted = self._model.wanted(function, share)
        if ready is not None and wanted > limit:
            like = self._queue.work_like(closure)
            if like is not None:
                self._runtime.prepare(self._worker, attempt.work, like, wanted)
        if limit == 1:
            return [attempt]
        # The queue calls the model with its lock held.
        attempts = self._queue.take_batch(
            attempt, limit, lambda available: self._model.steps(function, available, ready)
        )
        self._count = len(attempts)
        return attempts

    def _gather_runs(self, attempt: Attempt) -> None:
        """Decides how many runs of a closure of many runs the call makes; leaves the others to all workers."""
        function = self._function
        most = 1 if function is None else self._runtime.most_fused(self._worker, attempt.work)
        if most < 2:
            self._function = None
            self._count = self._queue.begin_runs(attempt, lambda _: 1)
            return
        ready = self._ready(attempt)

        def possible(available: int) -> int:
            share = available if attempt.closure.target is not None else self._queue.share(available)
            return min(share + self._model.beyond_share(function), available, most)

        wanted = self._model.wanted(function, possible(self._queue.available_runs(attempt)))
        if ready is not None and wanted > 1 and wanted not in ready:
            self._runtime.prepare(self._worker, attempt.work, attempt.work, wanted)
        self._count = self._queue.begin_runs(
            attempt, lambda available: self._model.steps(function, possible(available), ready)
        )

    def _ready(self, attempt: Attempt) -> Mapping[int, float] | None:
        """Returns the ready sizes; None for all: a size set by the user is built when it is needed."""
        if self._limit is not None:
            return None
        ready = self._runtime.ready(self._worker, attempt.work)
        if ready is not None:
            self._model.note_ready(self._function, ready)
        return ready

    def run(self, attempts: Sequence[Attempt]) -> Sequence[Any]:
        """Runs the attempts that were gathered last; returns their results. Raises the errors of the runtime."""
        first, count = attempts[0], self._count
        closure, work = first.closure, first.work
        waited = first.started - closure.waiting_since
        self._queue.events.record("closures_started", self._task, closure.name, count, waited)
        start = time.monotonic()
        results: Sequence[Any]
        if closure.whole is not None:
            results = (self._runtime.run_steps(self._worker, work, count, first.cancellation),)
        elif count == 1:
            results = (self._runtime.run(self._worker, work, first.cancellation),)
        else:
            works = [attempt.work for attempt in attempts]
            results = self._runtime.run_fused(self._worker, works, first.call_cancellation)
        if self._function is not None:
            self._model.record(self._function, count, time.monotonic() - start)
        return results

    def record_failure(self, kind: FailureKind) -> None:
        """Records that the latest call, of several closures, failed."""
        if self._function is not None and kind in (FailureKind.USER, FailureKind.INPUT, FailureKind.END_OF_DATA):
            self._model.record_error(self._function)
