"""The closures that wait, in deques: one for all workers, one for each worker, and those that some workers may run.

    for all workers    a1 b1 a2 b2 a3        the input of a1, a2, a3 ends on worker 0; worker 1 is lost while it runs b1
                           |
    for all workers    b2                    any worker
    apart              a1 a2 a3              any worker but 0
                       b1                    any worker but 1, as long as there is another one

Those that wait for arguments are kept besides. A closure that stops waiting in the middle of a deque stays there with
`is_queued` cleared, and is skipped later; so each closure that waits costs 8 bytes here, and cancelling one costs the
same wherever it is. Invariant: the first closure of a deque is queued, so nothing waits in a deque only if it is empty.

Plain data structures, guarded by the queue's lock: these, and `IdleWorker`, a worker that waits for a closure.
"""

import itertools
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from coordinator.queueing.closure import Closure, ErrorScope
from coordinator.queueing.ended_inputs import EndedInputs, Starved
from coordinator.runtime import FiniteInput


class Apart(NamedTuple):
    """What decides which workers may run a closure that not every worker may run.

    Attributes:
      inputs: one of its inputs has ended on a worker, which may not run it.
      lost_on, needs_another: of the closure.
    """

    inputs: tuple[FiniteInput, ...]
    lost_on: frozenset[int]
    needs_another: bool


# Deques are rebuilt when they may hold more stale entries than this, and than closures that wait.
_MIN_STALE = 1000


class WaitingClosures:
    """The closures that wait for a worker or for arguments.

    Attributes:
      count: how many runs of scheduled closures wait; those of internal ones are not counted.
      for_all: the closures that any worker may run; stale entries are skipped.
      inputs: knows which inputs have ended on which workers.
      away: the workers that are lost now.
      apart: closures that not every worker may run, by what decides which workers may; none of these deques is empty.
    """

    def __init__(self) -> None:
        self.count = 0
        self.inputs = EndedInputs()
        self.away: set[int] = set()
        # By the index of the only worker that may run them; those for all workers under None.
        self._queues: defaultdict[int | None, deque[Closure]] = defaultdict(deque)
        self.for_all = self._queues[None]
        # By the index of their worker.
        self._internal: defaultdict[int, deque[Closure]] = defaultdict(deque)
        self.apart: dict[Apart, deque[Closure]] = {}
        self._blocked: dict[Closure, None] = {}
        self._stale = 0

    def __iter__(self) -> Iterator[Closure]:
        return (each for each in itertools.chain(*self._all_queues(), self._blocked) if each.is_queued)

    def has_next(self, worker: int) -> bool:
        """Returns whether there is a closure that this worker may run."""
        if self.for_all or self._queues.get(worker) or self._internal.get(worker):
            return True
        return any(self._may_run(apart, worker) for apart in self.apart)

    def has_internal(self, worker: int) -> bool:
        """Returns whether there is an internal closure for this worker."""
        return bool(self._internal.get(worker))

    def pop_next(self, worker: int, beside: Closure | None = None, *, is_quiet: bool = False) -> Closure | None:
        """Removes the next closure for a worker: internal ones, then its own, then those for all workers.

        Args:
          worker: the worker's index.
          beside: only those among which this closure, for all workers, has waited; None for all.
          is_quiet: whether only internal ones may start.

        Returns:
          The closure; None if there is none.
        """
        if beside is not None:
            queue = self.queue_with(beside)
        elif is_quiet:
            queue = self._internal[worker]
        else:
            queue = self._internal.get(worker) or self._queues.get(worker) or self.for_all
            if self.apart and queue is self.for_all:
                queue = min(self._queues_for_all(worker), key=lambda each: each[0].number, default=queue)
        if not queue:
            return None
        closure = queue.popleft()
        closure.is_queued = False
        self._recount(closure, 0)
        if self.apart or (queue and not queue[0].is_queued):
            self._remove_stale(queue)
        return closure

    def waiting_for(self, worker: int) -> list[Closure]:
        """Returns the closures that only this worker may run."""
        queues = self._internal.get(worker, ()), self._queues.get(worker, ())
        return [closure for closure in itertools.chain(*queues) if closure.is_queued]

    def matching_ahead(self, closure: Closure, worker: int, limit: int) -> int:
        """Returns how many closures are next for a worker and have the fusion key of one that it runs.

        Args:
          closure: what it runs, which was for all workers.
          worker: the worker's index.
          limit: the maximum.
        """
        queue, key = self.queue_with(closure), closure.fusion_key
        others = [each[0].number for each in self._queues_for_all(worker) if each is not queue]
        end = min(others, default=sys.maxsize)
        waiting = itertools.islice((each for each in queue if each.is_queued), limit)
        return sum(1 for _ in itertools.takewhile(lambda each: each.fusion_key == key and each.number < end, waiting))

    def queue_with(self, closure: Closure) -> deque[Closure]:
        """Returns the closures among which one for all workers waits, or would; to be changed by this class alone."""
        apart = _apart(closure)
        return self.for_all if apart is None else self.apart.get(apart) or deque()

    def add(self, closure: Closure, at_front: bool = False) -> None:
        """Adds a closure."""
        queue = None if closure.blockers else self._queue_of(closure)
        runs = 0 if closure.is_internal else closure.future.runs
        # Nothing is called between these lines, so Ctrl-C does not come between them.
        closure.is_queued = True
        closure.counted = runs
        self.count += runs
        if queue is None:
            self._blocked[closure] = None
        elif at_front:
            queue.appendleft(closure)
        else:
            queue.append(closure)

    def remove(self, closure: Closure) -> None:
        """Removes a closure, if it waits."""
        if not closure.is_queued:
            return
        closure.is_queued = False
        self._recount(closure, 0)
        if closure.blockers:
            del self._blocked[closure]
            return
        self._remove_stale(self._queue_of(closure))
        self._stale += 1
        if self._stale > max(_MIN_STALE, self.count):
            self._stale = 0
            for queue in self._all_queues():
                waiting = [closure for closure in queue if closure.is_queued]
                queue.clear()
                queue.extend(waiting)

    def recount(self, closure: Closure) -> None:
        """Counts the runs of a closure that has become larger or smaller, if it waits."""
        if closure.is_queued:
            self._recount(closure, closure.future.runs)

    def _recount(self, closure: Closure, runs: int) -> None:
        # What was counted is subtracted, not the runs that the closure has by now.
        self.count += runs - closure.counted
        closure.counted = runs

    def end_input(self, ended: FiniteInput, worker: int, scope: ErrorScope) -> None:
        """Records that a worker's part of an input has ended; see `EndedInputs.end`."""
        is_first = not ended.ended
        self.inputs.end(ended, worker, scope)
        if is_first:
            waiting = [closure for closure in self.for_all if closure.is_queued]
            self.for_all.clear()
            for closure in waiting:
                self._queue_of(closure).append(closure)

    def starved(self, worker: int | None) -> list[tuple[Closure, Starved]]:
        """Returns the closures that no worker can run; of those for one worker, only those for `worker`."""
        for_worker = () if worker is None else self._queues.get(worker, ())
        found = [(closure, self.inputs.why_starved(closure)) for closure in for_worker]
        for queue in self.apart.values():
            if (reason := self.inputs.why_starved(queue[0])) is not None:
                found += [(closure, reason) for closure in queue]
        return [(closure, reason) for closure, reason in found if reason is not None and closure.is_queued]

    def _queues_for_all(self, worker: int) -> list[deque[Closure]]:
        """Returns the deques that are not empty, for no single worker, and of which this one may run the closures."""
        apart = [each for apart, each in self.apart.items() if self._may_run(apart, worker)]
        return [*apart, self.for_all] if self.for_all else apart

    def _queue_of(self, closure: Closure) -> deque[Closure]:
        if closure.is_internal:
            assert closure.target is not None
            return self._internal[closure.target]
        if closure.target is None and (apart := _apart(closure)) is not None:
            return self.apart.setdefault(apart, deque())
        return self._queues[closure.target]

    def _all_queues(self) -> Iterable[deque[Closure]]:
        return (*self._internal.values(), *self._queues.values(), *self.apart.values())

    def _remove_stale(self, queue: deque[Closure]) -> None:
        """Removes closures that do not wait any more from the front of a deque."""
        while queue and not queue[0].is_queued:
            queue.popleft()
        if not queue and self.apart:
            self.apart = {apart: each for apart, each in self.apart.items() if each}

    def _may_run(self, apart: Apart, worker: int) -> bool:
        """Returns whether a worker may run closures that wait apart."""
        if not self.inputs.has_data(apart.inputs, worker):
            return False
        return worker not in apart.lost_on or not self.has_other(apart, is_present=not apart.needs_another)

    def has_other(self, apart: Apart, *, is_present: bool) -> bool:
        """Returns whether another worker than those of `lost_on` can run closures, now or when it returns.

        Args:
          apart: of these closures.
          is_present: whether a worker that is away does not count.
        """
        others = self.inputs.workers - apart.lost_on
        return any(
            self.inputs.has_data(apart.inputs, worker) for worker in (others - self.away if is_present else others)
        )


def _apart(closure: Closure) -> Apart | None:
    """Returns why a closure for all workers waits apart from those that every worker may run; None if it does not."""
    if closure.lost_on:
        return Apart(closure.inputs, closure.lost_on, closure.needs_another)
    for each in closure.inputs:
        if each.ended:
            return Apart(closure.inputs, closure.lost_on, closure.needs_another)
    return None


class IdleWorker:
    """One wait of one worker for a closure.

    Args:
      index: the worker's index.

    Attributes:
      wakeup: a lock that is released to wake the worker.
      is_interrupted: whether it is to take no closure then.
    """

    __slots__ = ("index", "is_interrupted", "wakeup")

    def __init__(self, index: int) -> None:
        self.index = index
        self.is_interrupted = False
        self.wakeup = threading.Lock()
        self.wakeup.acquire()

    def wait(self, timeout: float | None) -> bool:
        """Waits, without the queue's lock, at most `timeout` seconds; returns whether the worker was woken."""
        return self.wakeup.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))
