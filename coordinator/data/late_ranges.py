"""Ranges that are bound to functions late: when a worker takes a function, it gets one that it has read ahead.

    scheduled     f1 f2 f3 f4 f5 ...          each has its own range at first: 1 2 3 4 5 ...
    worker 0      takes f1 with range 1, begins to read 2 and 3
    worker 1      takes f2 with range 4 (f4 has range 2 now), begins to read 5 and 6
    worker 0      takes f3 with range 2, begins to read 7

Each function that waits has one of the ranges that wait, and taking another one exchanges the two. So a range has one
function at any time, and what was read ahead by a worker that died is read by another.

A plain data structure with a lock, under which nothing else is called.
"""

import functools
import heapq
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from coordinator.future import Future

# How many numbers describe a range.
POSITIONS = 5


class Choice(NamedTuple):
    """What a worker is to do for a function that it has taken.

    Attributes:
      positions: the range of the function.
      slot: where the worker has read it ahead; None if it has not.
      dropped: slots whose range is not wanted any more, with it.
      begun: slots, each with the range that is to be read there next.
    """

    positions: Any
    slot: int | None
    dropped: Sequence[tuple[int, Any]]
    begun: Sequence[tuple[int, Any]]


class LateRange:
    """A range that is chosen when a worker takes the function of which it is an argument.

    Args:
      number: of the range, until then.
      ranges: those among which is chosen.
      follower: called with it, and the future of the function that is scheduled with it.

    Attributes:
      number: as given, or that of the range for which it was exchanged.
    """

    __slots__ = ("_follower", "is_scheduled", "number", "ranges")

    def __init__(self, number: int, ranges: "LateRanges", follower: Callable[["LateRange", Future], None]) -> None:
        self.number = number
        self.ranges = ranges
        self.is_scheduled = False
        self._follower = follower

    def follow(self, future: Future) -> None:
        """Records that a function is scheduled with it.

        Raises:
          ValueError: another one was.
        """
        if self.is_scheduled:
            raise ValueError(
                "Two functions were scheduled with one range of Epochs(prefetch=...), which gives each function the "
                "range that its worker has read: schedule one function with each, or leave prefetch out."
            )
        self.is_scheduled = True
        self._follower(self, future)
        self.ranges.add(self)

    def value_on(self, context: Any) -> Any:
        """Returns the range and its examples for a worker: tensors on that worker."""
        return self.ranges.value_on(self, context)

    def __repr__(self) -> str:
        return "<a range of examples, chosen when a worker takes the function>"


class _Reading(NamedTuple):
    """What a worker reads ahead: the number of its connection, and its slots with the numbers of ranges, in order."""

    connection: int
    slots: list[tuple[int, int]]


_NOTHING = _Reading(-1, [])


class LateRanges:
    """The ranges of functions that wait for a worker.

    Args:
      slots: how many ranges each worker reads ahead.
      positions_of: returns the positions of a range, by its number.
      reader: reads them on the workers: a `ReadAhead`.

    Attributes:
      spec: the `tf.TypeSpec`s of a range and its examples, with which functions are traced.
    """

    def __init__(self, slots: int, positions_of: Callable[[int], Any], reader: Any) -> None:
        self.spec = reader.spec
        self._count = slots
        self._positions_of = positions_of
        self._reader = reader
        self._lock = threading.Lock()
        # By the number of its range.
        self._waiting: dict[int, LateRange] = {}
        # A heap of the ranges that wait and that no worker reads; some of them do not wait any more.
        self._unread: list[int] = []
        # By the index of the worker.
        self._reading: dict[int, _Reading] = {}

    def new(self, number: int, follower: Callable[[LateRange, Future], None]) -> LateRange:
        """Returns a range for a function that is to be scheduled."""
        return LateRange(number, self, follower)

    def add(self, late: LateRange) -> None:
        """Adds the range of a function that was scheduled."""
        with self._lock:
            self._waiting[late.number] = late
            heapq.heappush(self._unread, late.number)

    def remove(self, late: LateRange) -> None:
        """Removes the range of a function that has ended, perhaps before a worker took it. It keeps its number."""
        with self._lock:
            if self._waiting.get(late.number) is late:
                del self._waiting[late.number]

    def value_on(self, late: LateRange, context: Any) -> Any:
        """Returns the range and its examples for a worker, and has it read others ahead."""
        choice = self._choose(late, context.index, context.connection_number)
        return self._reader.value_on(context, choice, functools.partial(self.forget, context.index))

    def forget(self, worker: int) -> None:
        """Has what a worker has read ahead read again, perhaps by others."""
        with self._lock:
            self._forget(worker)

    def _choose(self, late: LateRange, worker: int, connection: int) -> Choice:
        with self._lock:
            if worker in self._reading and self._reading[worker].connection != connection:
                self._forget(worker)
            slots = self._reading.setdefault(worker, _Reading(connection, [])).slots
            slot, dropped = self._exchange(late, slots)
            busy = {each for each, _ in slots}
            begun = []
            for each in range(self._count):
                if each not in busy and (number := self._next_unread()) is not None:
                    slots.append((each, number))
                    begun.append((each, number))
        described = [[(each, self._positions_of(number)) for each, number in pairs] for pairs in (dropped, begun)]
        return Choice(self._positions_of(late.number), slot, *described)

    def _exchange(self, late: LateRange, slots: list[tuple[int, int]]) -> tuple[int | None, list[tuple[int, int]]]:
        """Gives a function that no worker has taken before the best range; returns its slot, and those not wanted."""
        dropped: list[tuple[int, int]] = []
        if self._waiting.get(late.number) is not late:
            # It was taken before, so its range may have been trained in part.
            return None, dropped
        slot = None
        while slots:
            slot, number = slots.pop(0)
            if number in self._waiting:
                break
            dropped.append((slot, number))
            slot = None
        else:
            unread = self._next_unread()
            number = late.number if unread is None else unread
        other = self._waiting.pop(number)
        if other is not late:
            other.number, late.number = late.number, number
            self._waiting[other.number] = other
        return slot, dropped

    def _next_unread(self) -> int | None:
        while self._unread:
            number = heapq.heappop(self._unread)
            if number in self._waiting:
                return number
        return None

    def _forget(self, worker: int) -> None:
        for _, number in self._reading.pop(worker, _NOTHING).slots:
            if number in self._waiting:
                heapq.heappush(self._unread, number)
