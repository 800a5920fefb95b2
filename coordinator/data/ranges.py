"""Ranges of examples as arguments of functions: vectors, and ranges that are chosen when a worker takes the function.

A `PositionRange` never changes. A `LateRange` may be exchanged for a range that the function's worker has read ahead:

    scheduled     f1 f2 f3 f4 f5 ...          each has its own range at first: 1 2 3 4 5 ...
    worker 0      takes f1 with range 1, begins to read 2 and 3
    worker 1      takes f2 with range 4 (f4 has range 2 now), begins to read 5 and 6
    worker 0      takes f3 with range 2, begins to read 7

Each waiting function has one of the waiting ranges. A function gets another range by an exchange with another function,
so that a range always has one function. If a worker dies, other workers read the ranges that the worker had read ahead.
"""

import functools
import heapq
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from coordinator.future import Future

# The number of values in the vector of a range.
POSITIONS = 5


class PositionRange(np.ndarray[Any, np.dtype[np.int64]]):
    """An int64 vector that names a range of examples.

    The client treats the vector as any other array: one message carries it, and functions that take it can be fused.
    Arrays that are made from the vector, such as slices, are not followed.

    Attributes:
      number: the number of the range in all epochs.
      follower: called with the range and the future of each function that gets the range, before the function can run.
    """

    number: int
    follower: Callable[["PositionRange", Future], None] | None = None

    def follow(self, future: Future) -> None:
        """Records that a function is scheduled with the range."""
        if self.follower is not None:
            self.follower(self, future)


class LateRange:
    """A range that `ranges` chooses when a worker takes its function. An exchange changes `number`."""

    __slots__ = ("_follower", "is_scheduled", "number", "ranges")

    def __init__(self, number: int, ranges: "LateRanges", follower: Callable[["LateRange", Future], None]) -> None:
        self.number = number
        self.ranges = ranges
        self.is_scheduled = False
        self._follower = follower

    def follow(self, future: Future) -> None:
        """Records that a function is scheduled with the range. Raises ValueError for a second function."""
        if self.is_scheduled:
            raise ValueError(
                "Two functions were scheduled with one range of Epochs(prefetch=...), which gives each function the "
                "range that its worker has read: schedule one function with each, or leave prefetch out."
            )
        self.is_scheduled = True
        self._follower(self, future)
        self.ranges.add(self)

    def value_on(self, context: Any) -> Any:
        """Returns the range and its examples, as tensors on the worker of `context`."""
        return self.ranges.value_on(self, context)

    def __repr__(self) -> str:
        return "<a range of examples, chosen when a worker takes the function>"


_KINDS = frozenset({PositionRange, LateRange})


def position_ranges(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[PositionRange | LateRange]:
    """Returns the ranges among the arguments of a function, also inside structures."""
    ranges = []
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind in _KINDS:
            ranges.append(value)
        elif kind in (tuple, list, dict):
            ranges += [leaf for leaf in tf.nest.flatten(value) if type(leaf) in _KINDS]
    return ranges


class Choice(NamedTuple):
    """The range `positions` of a function that a worker has taken, and the changes of the worker's slots.

    `slot` is the slot in which the worker has read the range ahead, or None. `dropped` are slots with ranges that are
    no longer wanted. `begun` are slots with the ranges that the worker reads ahead next.
    """

    positions: Any
    slot: int | None
    dropped: Sequence[tuple[int, Any]]
    begun: Sequence[tuple[int, Any]]


class LateRanges:
    """The ranges of functions that wait for a worker. `positions_of` and `reader` are called without the lock.

    Each worker reads `slots` ranges ahead with `reader`, a `ReadAhead`. `positions_of` maps the number of a range to
    its positions. `spec` has the `tf.TypeSpec`s of a range and its examples. Functions are traced with `spec`.
    """

    def __init__(self, slots: int, positions_of: Callable[[int], Any], reader: Any) -> None:
        self.spec = reader.spec
        self._count = slots
        self._positions_of = positions_of
        self._reader = reader
        self._lock = threading.RLock()
        # Maps range numbers to waiting ranges.
        self._waiting: dict[int, LateRange] = {}
        # A heap of the numbers of ranges that no worker reads. Some of these ranges may no longer wait.
        self._unread: list[int] = []
        # Maps a worker's index to pairs of slot and range number, in the order in which the worker reads them.
        self._reading: dict[int, list[tuple[int, int]]] = {}
        # Maps a worker's index to the number of the connection on which the worker reads.
        self._connections: dict[int, int] = {}

    def add(self, late: LateRange) -> None:
        with self._lock:
            self._waiting[late.number] = late
            heapq.heappush(self._unread, late.number)

    def remove(self, late: LateRange) -> None:
        """Removes the range of a function that has ended, with or without a worker. The range keeps its number."""
        with self._lock:
            if self._waiting.get(late.number) is late:
                del self._waiting[late.number]

    def value_on(self, late: LateRange, context: Any) -> Any:
        """Returns the range and its examples for a worker, which then begins to read other ranges ahead."""
        worker = context.index
        with self._lock:
            if self._connections.get(worker) != context.connection_number:
                self.forget(worker)
                self._connections[worker] = context.connection_number
            slots = self._reading.setdefault(worker, [])
            slot, dropped = self._exchange(late, slots)
            begun = []
            for free in sorted(set(range(self._count)).difference(busy for busy, _ in slots)):
                if (number := self._next_unread()) is not None:
                    slots.append((free, number))
                    begun.append((free, number))
        described = [[(slot, self._positions_of(number)) for slot, number in pairs] for pairs in (dropped, begun)]
        choice = Choice(self._positions_of(late.number), slot, *described)
        return self._reader.value_on(context, choice, functools.partial(self.forget, worker))

    def forget(self, worker: int) -> None:
        """Gives the ranges that a lost worker has read ahead to other workers."""
        with self._lock:
            for _, number in self._reading.pop(worker, ()):
                if number in self._waiting:
                    heapq.heappush(self._unread, number)

    def _exchange(self, late: LateRange, slots: list[tuple[int, int]]) -> tuple[int | None, list[tuple[int, int]]]:
        """Gives the best range to a function that no worker has taken before. Returns its slot, and unwanted slots."""
        dropped: list[tuple[int, int]] = []
        if self._waiting.get(late.number) is not late:
            # A worker has taken the function before, so the model may contain some batches of the range.
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
