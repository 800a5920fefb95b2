"""The ledger of ranges of examples: which ranges are done, which are out, and which come next.

    next --> out --finish--> done
      ^       |
      '-- give_back          a function failed, was cancelled, or was never scheduled

Ranges have the numbers 0, 1, 2, ... through all epochs. All ranges below a watermark and a few above it are done, so
only ranges that are out need memory. A plain data structure without a lock: its user holds one.
"""

import heapq
import math
from collections.abc import Iterable

from coordinator.errors import ClosureCancelledError, ClosureQuarantined, ParameterServerLost, WorkerLost

# No range this far above the first range that is not done is taken. This bounds what is kept of single ranges, here and
# on the parameter servers, although one range may take very long.
WINDOW = 2**16
# How many ranges without a scheduled function a loop may take.
MOST_UNSCHEDULED = 1000


class Ledger:
    """The ledger of the `total` ranges of all epochs.

    Attributes:
      limit: ranges from this number on are not taken.
      below: all ranges with smaller numbers are done.
      done: further ranges that are done.
      skipped: the done ranges that were given up.
      given_back: how often a range was given back.
      rolled_back: how many ranges were done and had to be done again.
      most_failures: a range is skipped after this number of failures; None keeps the first error.
      strategy_raises: whether the strategy raises the errors of functions.
      error: the error of a function that the strategy does not raise; the loop over the ranges raises it.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.limit = total
        self.below = 0
        self.done: set[int] = set()
        self.skipped: set[int] = set()
        self.given_back = self.rolled_back = 0
        self.most_failures: int | None = None
        self.strategy_raises = True
        self.error: BaseException | None = None
        # All ranges from here on come next, except ranges that are done or out.
        self._next = 0
        # Ranges that come before these: a heap.
        self._again: list[int] = []
        # The number of running functions of each range that is out; 0 if none was scheduled yet.
        self._out: dict[int, int] = {}
        # Ranges that are out and one of whose functions has failed.
        self._incomplete: set[int] = set()
        # The number of failures of a range's functions.
        self._failures: dict[int, int] = {}

    @property
    def count_done(self) -> int:
        return self.below + len(self.done)

    @property
    def count_out(self) -> int:
        return len(self._out)

    @property
    def progress(self) -> tuple[int, int, int]:
        """A value that changes whenever a range was done, given back or rolled back."""
        return self.count_done, self.given_back, self.rolled_back

    @property
    def is_over(self) -> bool:
        """Whether all ranges below the limit are done."""
        return self.below >= min(self.limit, self.total)

    def has_next(self, most_out: float = math.inf) -> bool:
        """Returns whether a range can be taken now, with fewer than `most_out` ranges out."""
        while self._next < self.total and (self.is_done(self._next) or self._next in self._out):
            self._next += 1
        number = self._again[0] if self._again else self._next
        return len(self._out) < most_out and number < min(self.limit, self.total, self.below + WINDOW)

    def next(self, most_out: float = math.inf) -> int | None:
        """Takes the smallest range that was given back, otherwise the next one in order; None without `has_next`."""
        if not self.has_next(most_out):
            return None
        number = heapq.heappop(self._again) if self._again else self._next
        self._out[number] = 0
        return number

    def is_done(self, number: int) -> bool:
        return number < self.below or number in self.done

    def is_unscheduled(self, number: int) -> bool:
        """Returns whether a range is out without a scheduled function."""
        return self._out.get(number) == 0

    def check_scheduled(self, taken: dict[int, None]) -> None:
        """Removes the ranges with a function from `taken`; RuntimeError if too many are left, or they block a loop."""
        if len(taken) < MOST_UNSCHEDULED and self.has_next():
            return
        for number in [number for number in taken if not self.is_unscheduled(number)]:
            del taken[number]
        if len(taken) >= MOST_UNSCHEDULED or (taken and not self.has_next()):
            shown = ", ".join(map(str, list(taken)[:10])) + (", ..." if len(taken) > 10 else "")
            raise RuntimeError(
                f"{len(taken)} ranges were handed out, and no function was scheduled with them: {shown}. In the loop "
                "over epochs.on(strategy), call strategy.schedule(step, args=(positions,)) with the vector itself."
            )

    def schedule(self, number: int) -> None:
        """Records that a function was scheduled with a range, perhaps one of several."""
        self._out[number] = self._out.get(number, 0) + 1
        if number in self._again:
            self._again.remove(number)
            heapq.heapify(self._again)

    def finish(self, number: int) -> None:
        """Records that a function with a range has finished; the last one makes it done, unless another has failed."""
        if self._remove_function(number):
            if number in self._incomplete:
                self._take_again(number)
            else:
                self._add_done(number)
        if number in self._failures and self.is_done(number):
            del self._failures[number]

    def fail(self, number: int, error: BaseException | None) -> bool:
        """Gives a range back, or skips it, after its function's error (None: cancelled); returns True if skipped."""
        if error is not None and not isinstance(error, ClosureCancelledError | ParameterServerLost):
            self._failures[number] = failures = self._failures.get(number, 0) + 1
            if self.most_failures is None:
                if not self.strategy_raises or isinstance(error, ClosureQuarantined | WorkerLost):
                    # The strategy does not raise it, or raises it only when nothing is scheduled any longer.
                    self.error = self.error or error
            elif failures >= self.most_failures or isinstance(error, ClosureQuarantined):
                del self._failures[number]
                self.skip(number)
                return True
        self.give_back(number)
        return False

    def give_back(self, number: int) -> None:
        """Records that a function with a range, perhaps not scheduled yet, will not finish.

        The range comes next again when no other function with it runs.
        """
        self._incomplete.add(number)
        if self._remove_function(number):
            self._take_again(number)

    def skip(self, number: int) -> None:
        """Gives a range up: it counts as done, and is listed as skipped."""
        self._remove_function(number)
        self._incomplete.discard(number)
        if not self.is_done(number):
            self.skipped.add(number)
            self._add_done(number)

    def restore(self, below: int, done: Iterable[int], skipped: Iterable[int] = ()) -> None:
        """Replaces the record of done ranges. Ranges stay out: their functions run on the restored model."""
        before = self.count_done
        self.below = min(below, self.total)
        # There may be fewer epochs than before.
        self.done = {number for number in done if self.below <= number < self.total}
        self.skipped = {number for number in skipped if number < self.total}
        self._raise_watermark()
        # A reset may come before the restoring of a checkpoint: both count once.
        self.rolled_back = max(0, self.rolled_back + before - self.count_done)
        self._again.clear()
        self._next = self.below

    def _remove_function(self, number: int) -> bool:
        """Removes one function of a range; returns True if none is left."""
        remaining = self._out.pop(number, 0) - 1
        if remaining > 0:
            self._out[number] = remaining
        return remaining <= 0

    def _take_again(self, number: int) -> None:
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
