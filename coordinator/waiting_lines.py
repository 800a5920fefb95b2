"""The lines in which closures wait: one for all workers, one for each worker, and those that wait for arguments.

A plain data structure without a lock; `ClosureQueue` guards it. Each line is an ordered dictionary, for a closure that
is cancelled leaves from the middle of a line of any length.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterator

from coordinator.closure import Closure, ClosureState

_Line = OrderedDict[Closure, None]


class WaitingLines:
    """Closures in order, by who may run them."""

    def __init__(self) -> None:
        self._for_all: _Line = OrderedDict()
        self._for_one: dict[int, _Line] = {}
        self._blocked: _Line = OrderedDict()
        self._scheduled = 0

    def append(self, closure: Closure) -> None:
        """To the end of its line."""
        self._line_of(closure)[closure] = None
        self._scheduled += not closure.is_internal

    def push_front(self, closure: Closure) -> None:
        """To the front of its line."""
        self.append(closure)
        self._line_of(closure).move_to_end(closure, last=False)

    def discard(self, closure: Closure) -> bool:
        """Takes it out of its line, wherever it is there; whether it was in one."""
        line = self._line_of(closure)
        if closure not in line:
            return False
        del line[closure]
        self._scheduled -= not closure.is_internal
        return True

    def has_next(self, worker: int) -> bool:
        """Whether there is one that this worker may run."""
        return bool(self._for_all or self._for_one.get(worker))

    def pop_next(self, worker: int) -> Closure:
        """Takes out the one that this worker is to run next: its own line comes before the common one."""
        closure, _ = (self._for_one.get(worker) or self._for_all).popitem(last=False)
        self._scheduled -= not closure.is_internal
        return closure

    def of_worker(self, worker: int) -> list[Closure]:
        """Those that this worker alone may run."""
        return list(self._for_one.get(worker, ()))

    def __contains__(self, closure: Closure) -> bool:
        return closure in self._line_of(closure)

    def __iter__(self) -> Iterator[Closure]:
        return itertools.chain(self._for_all, *self._for_one.values(), self._blocked)

    def __len__(self) -> int:
        """How many wait, for whatever, the library's own left out."""
        return self._scheduled

    def _line_of(self, closure: Closure) -> _Line:
        if closure.state is ClosureState.BLOCKED:
            return self._blocked
        if closure.target is None:
            return self._for_all
        return self._for_one.setdefault(closure.target, OrderedDict())
