"""The lines in which closures wait: one for all workers, one for each worker, and those that wait for arguments.

A plain data structure without a lock; `ClosureQueue` guards it.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from coordinator.line import Line
from coordinator.queueing.closure import Closure, ClosureState


class WaitingLines:
    """Closures in order, by who may run them."""

    def __init__(self) -> None:
        self._for_all: Line[Closure] = Line()
        self._for_one: dict[int, Line[Closure]] = {}
        self._blocked: Line[Closure] = Line()
        self._scheduled = 0

    def append(self, closure: Closure) -> None:
        """To the end of its line."""
        self._line_of(closure).append(closure)
        self._scheduled += not closure.is_internal

    def push_front(self, closure: Closure) -> None:
        """To the front of its line."""
        self._line_of(closure).push_front(closure)
        self._scheduled += not closure.is_internal

    def discard(self, closure: Closure) -> bool:
        """Takes it out of its line, wherever it is there; whether it was in one."""
        if not closure.is_in_line:
            return False
        self._line_of(closure).remove(closure)
        self._scheduled -= not closure.is_internal
        return True

    @property
    def has_for_all(self) -> bool:
        """Whether there is one that any worker may run."""
        return bool(self._for_all)

    def has_next(self, worker: int) -> bool:
        """Whether there is one that this worker may run."""
        return bool(self._for_all or self._for_one.get(worker))

    def pop_next(self, worker: int) -> Closure:
        """Takes out the one that this worker is to run next: its own line comes before the common one."""
        return self._pop(self._for_one.get(worker) or self._for_all)

    def pop_for_all(self) -> Closure:
        """Takes out the first that any worker may run."""
        return self._pop(self._for_all)

    def alike_ahead(self, is_alike: Callable[[Any], bool], limit: int) -> int:
        """How many in a row, at most `limit`, at the front of the common line were never tried and have such work."""
        may_join = (
            closure.asks_for_nothing and not closure.attempts and is_alike(closure.work) for closure in self._for_all
        )
        return sum(1 for _ in itertools.takewhile(bool, itertools.islice(may_join, limit)))

    @property
    def for_all(self) -> int:
        """How many wait for whichever worker is free."""
        return len(self._for_all)

    def of_worker(self, worker: int) -> list[Closure]:
        """Those that this worker alone may run."""
        return list(self._for_one.get(worker, ()))

    def __iter__(self) -> Iterator[Closure]:
        return itertools.chain(self._for_all, *self._for_one.values(), self._blocked)

    def __len__(self) -> int:
        """How many wait, for whatever, the library's own left out."""
        return self._scheduled

    def _pop(self, line: Line[Closure]) -> Closure:
        closure = line.pop_front()
        self._scheduled -= not closure.is_internal
        return closure

    def _line_of(self, closure: Closure) -> Line[Closure]:
        if closure.state is ClosureState.BLOCKED:
            return self._blocked
        if closure.target is None:
            return self._for_all
        line = self._for_one.get(closure.target)
        if line is None:
            line = self._for_one[closure.target] = Line()
        return line
