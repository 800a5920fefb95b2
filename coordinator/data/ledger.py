"""Which ranges of examples are done, which are in flight, and which are next.

    next --> out --finish--> done
      ^       |
      '-- give_back          a function failed, was cancelled, or was never scheduled

Ranges have the numbers 0, 1, 2, ... through all epochs. All ranges below a watermark and a few above it are done, so
that memory is needed only for those in flight.

A plain data structure without a lock or a call to other code.

Ranges that were handed out and are not done: those without a function, and those whose function has failed.

Plain data structures without a lock or a call to other code, to be used with the lock of the ledger held.
"""

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.data.late_ranges import LateRange
from coordinator.errors import ClosureCancelledError, ClosureQuarantined, ParameterServerLost, WorkerLost
from coordinator.future import Future

# How far above the first range that is not done ranges are handed out: what is known of single ranges, here and on the
# parameter servers, stays this small although one of them may take very long.
WINDOW = 2**16


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochsStatistics:
    """How far the passes over the data have come.

    Attributes:
      ranges: how many ranges all epochs have.
      done: how many of them are in the model, skipped ones included.
      out: how many are in flight: handed out and not done.
      skipped: the ranges that were given up, each as epoch, position of its first example in the epoch, and number of
        examples.
      given_back: how often a range was handed out again because its function failed or was cancelled.
      rolled_back: how many ranges that were done had to be done again because a checkpoint was restored.
    """

    ranges: int
    done: int
    out: int
    skipped: tuple[tuple[int, int, int], ...]
    given_back: int
    rolled_back: int


class Ledger:
    """The ledger of the ranges of all epochs.

    Args:
      total: how many ranges there are.

    Attributes:
      limit: ranges from this number on are not handed out.
      below: all ranges with smaller numbers are done.
      done: further ranges that are done.
      skipped: those of the done ones that were given up.
      given_back: how often a range was given back.
      rolled_back: how many done ranges are not any more.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.limit = total
        self.below = 0
        self.done: set[int] = set()
        self.skipped: set[int] = set()
        self.given_back = self.rolled_back = 0
        # All ranges from here on are next, but those that are done or out.
        self._next = 0
        # Further ranges that are next: a heap, whose first is the smallest.
        self._again: list[int] = []
        # How many functions run for each range that is out; 0 if none was scheduled yet.
        self._out: dict[int, int] = {}
        # Ranges that are out and of which a function has failed.
        self._incomplete: set[int] = set()

    @property
    def count_done(self) -> int:
        """How many ranges are done."""
        return self.below + len(self.done)

    @property
    def count_out(self) -> int:
        """How many ranges are out."""
        return len(self._out)

    @property
    def progress(self) -> tuple[int, int, int]:
        """A value that changes whenever a range was done, given back or rolled back."""
        return self.count_done, self.given_back, self.rolled_back

    @property
    def is_over(self) -> bool:
        """Whether all ranges below the limit are done."""
        return self.below >= min(self.limit, self.total)

    def statistics(self) -> EpochsStatistics:
        """Returns how far it has come, without what was skipped."""
        return EpochsStatistics(
            ranges=self.total,
            done=self.count_done,
            out=self.count_out,
            skipped=(),
            given_back=self.given_back,
            rolled_back=self.rolled_back,
        )

    def has_next(self) -> bool:
        """Returns whether a range can be handed out now."""
        while self._next < self.total and (self.is_done(self._next) or self._next in self._out):
            self._next += 1
        return (self._again[0] if self._again else self._next) < min(self.limit, self.total, self.below + WINDOW)

    def next(self) -> int:
        """Hands out the next range: the smallest number of those given back, then the others in order."""
        assert self.has_next()
        number = heapq.heappop(self._again) if self._again else self._next
        self._out[number] = 0
        return number

    def is_done(self, number: int) -> bool:
        """Returns whether a range is done."""
        return number < self.below or number in self.done

    def is_unscheduled(self, number: int) -> bool:
        """Returns whether a range is out, and no function was scheduled with it."""
        return self._out.get(number) == 0

    def schedule(self, number: int) -> None:
        """Records that a function was scheduled with a range, perhaps one more."""
        self._out[number] = self._out.get(number, 0) + 1
        if number in self._again:
            self._again.remove(number)
            heapq.heapify(self._again)

    def finish(self, number: int) -> None:
        """Records that a function with a range has finished; the last one makes it done, unless another has failed."""
        if self._remove_function(number):
            if number in self._incomplete:
                self._hand_out_again(number)
            else:
                self._add_done(number)

    def give_back(self, number: int) -> None:
        """Records that a function with a range, perhaps not scheduled yet, will not finish.

        The range is next again when no other function with it runs.
        """
        self._incomplete.add(number)
        if self._remove_function(number):
            self._hand_out_again(number)

    def skip(self, number: int) -> None:
        """Gives a range up, in place of `give_back`: it is done, and listed as skipped."""
        self._remove_function(number)
        self._incomplete.discard(number)
        if not self.is_done(number):
            self.skipped.add(number)
            self._add_done(number)

    def skip_below(self, number: int) -> None:
        """Begins with a range as if all before it were done."""
        if number > self.below:
            self.restore(number, self.done, self.skipped)

    def restore(self, below: int, done: Iterable[int], skipped: Iterable[int] = ()) -> None:
        """Replaces what is done. What is out stays out: its functions run on the restored model."""
        before = self.count_done
        self.below = min(below, self.total)
        # There may be fewer epochs than before.
        self.done = {number for number in done if self.below <= number < self.total}
        self.skipped = {number for number in skipped if number < self.total}
        self._raise_watermark()
        # Restoring may be a reset, after which a checkpoint is restored.
        self.rolled_back = max(0, self.rolled_back + before - self.count_done)
        self._again.clear()
        self._next = self.below

    def _remove_function(self, number: int) -> bool:
        """Removes one function of a range. Returns True if none is left."""
        remaining = self._out.pop(number, 0) - 1
        if remaining > 0:
            self._out[number] = remaining
        return remaining <= 0

    def _hand_out_again(self, number: int) -> None:
        self._incomplete.discard(number)
        if not self.is_done(number) and number < self._next and number not in self._again:
            self.given_back += 1
            heapq.heappush(self._again, number)

    def _add_done(self, number: int) -> None:
        if not self.is_done(number):
            self.done.add(number)
            self._raise_watermark()

    def _raise_watermark(self) -> None:
        while self.below in self.done:
            self.done.remove(self.below)
            self.below += 1


# How many ranges may be handed out with which no function was scheduled yet.
MOST_UNSCHEDULED = 1000


class UnscheduledRanges:
    """The ranges that a loop was given and with which no function was scheduled yet.

    Args:
      ledger: knows with which ranges functions were scheduled.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # Some of them are scheduled by now: asking for each range would take longer.
        self._numbers: dict[int, None] = {}

    def add(self, number: int) -> None:
        """Adds a range that is handed out."""
        self._numbers[number] = None

    @property
    def may_be_too_many(self) -> bool:
        """Whether `check` must be called before another one is added."""
        return len(self._numbers) >= MOST_UNSCHEDULED

    def check(self) -> None:
        """Forgets those that were scheduled.

        Raises:
          RuntimeError: there are too many others, or any when no range is left to hand out.
        """
        ledger = self._ledger
        if not self.may_be_too_many and ledger.has_next():
            return
        self._numbers = {number: None for number in self._numbers if ledger.is_unscheduled(number)}
        if self.may_be_too_many or (self._numbers and not ledger.has_next()):
            shown = ", ".join(map(str, list(self._numbers)[:10])) + (", ..." if len(self._numbers) > 10 else "")
            raise RuntimeError(
                f"{len(self._numbers)} ranges were handed out, and no function was scheduled with them: {shown}. In "
                "the loop over epochs.on(strategy), call strategy.schedule(step, args=(positions,)) with the vector "
                "itself."
            )

    def give_back(self) -> None:
        """Gives all of them back."""
        for number in self._numbers:
            if self._ledger.is_unscheduled(number):
                self._ledger.give_back(number)


class FailedRanges:
    """Counts the failures of ranges, and keeps the error that the loop over them is to raise.

    A range whose function has failed is handed out again, its error is raised, or it is skipped.

    Args:
      ledger: of the ranges.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._error: BaseException | None = None
        self._failures: dict[int, int] = {}
        self._most: int | None = None
        self._strategy_raises = True

    def begin(self, *, most: int | None, strategy_raises: bool) -> None:
        """Begins a loop over the ranges.

        Args:
          most: a range is skipped after this number of failures; None raises the first error.
          strategy_raises: whether the strategy raises the errors of functions.
        """
        self._most = most
        self._strategy_raises = strategy_raises

    @property
    def has_error(self) -> bool:
        """Whether `raise_error` raises one."""
        return self._error is not None

    def raise_error(self) -> None:
        """Raises the error of a function that the strategy does not raise."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def forget(self, number: int) -> None:
        """Records that a function with a range has finished; others may still run."""
        if self._ledger.is_done(number):
            self._failures.pop(number, None)

    def settle(self, number: int, error: BaseException | None) -> bool:
        """Gives a range back, or skips it; returns whether it is skipped.

        Args:
          number: of the range.
          error: of its function; None if that was cancelled.
        """
        if error is None or isinstance(error, ClosureCancelledError | ParameterServerLost):
            self._ledger.give_back(number)
            return False
        self._failures[number] = failures = self._failures.get(number, 0) + 1
        if self._most is None:
            self._ledger.give_back(number)
            if not self._strategy_raises or isinstance(error, ClosureQuarantined | WorkerLost):
                # The strategy does not raise it, or raises it only when nothing is scheduled any more.
                self._error = self._error or error
        elif failures >= self._most or isinstance(error, ClosureQuarantined):
            del self._failures[number]
            self._ledger.skip(number)
            return True
        else:
            self._ledger.give_back(number)
        return False


class PositionRange(np.ndarray[Any, np.dtype[np.int64]]):
    """An int64 vector that names a range of examples.

    It is an argument like any other array: it travels in one message, and functions that take one are fused. Arrays
    that are made from it, such as slices, are not followed.

    Attributes:
      number: of the range in all epochs.
      follower: called with it and the future of each function that is scheduled with it, before that can run.
    """

    number: int
    follower: Callable[["PositionRange", Future], None] | None = None

    def follow(self, future: Future) -> None:
        """Records that a function is scheduled with it."""
        if self.follower is not None:
            self.follower(self, future)


_KINDS = frozenset({PositionRange, LateRange})


def position_ranges(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[PositionRange | LateRange]:
    """Returns the ranges among the arguments of a function, also inside of structures."""
    found = []
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind in _KINDS:
            found.append(value)
        elif kind in (tuple, list, dict):
            found += [leaf for leaf in tf.nest.flatten(value) if type(leaf) in _KINDS]
    return found
