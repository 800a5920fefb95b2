"""The ledger of ranges of examples, which records which ranges are done, which are out, and which come next.

    next --> out --finish--> done
      ^       |
      '-- give_back          a function failed, was cancelled, or was never scheduled

Ranges have the numbers 0, 1, 2, ... through all epochs. All ranges below a watermark are done. The ledger stores single
ranges only above the watermark. The ledger has no lock; the caller must hold one.
"""

import heapq
import math
from collections.abc import Iterable

from coordinator.errors import ClosureCancelledError, ClosureQuarantined, ParameterServerLost, WorkerLost

# A range is taken only if it is less than `WINDOW` above the first range that is not done. If one range takes long, the
# window bounds the number of single ranges that the ledger and the parameter servers store.
WINDOW = 2**16
# The maximum number of ranges that a loop may take without scheduling functions with them.
MOST_UNSCHEDULED = 1000


class Ledger:
    """The ledger of the `total` ranges of all epochs.

    Attributes:
      limit: only ranges with smaller numbers are taken.
      below: the watermark; all ranges with smaller numbers are done.
      done: the done ranges above the watermark.
      skipped: the done ranges that were given up.
      given_back: how often a range was given back.
      rolled_back: how many done ranges had to be done again because a checkpoint was restored.
      most_failures: a range is skipped after this number of failures. If None, no range is skipped.
      strategy_raises: whether the strategy raises the errors of functions.
      error: the first error that the loop over the ranges must raise, because the strategy does not raise it.
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
        # Ranges from this number on come next, except ranges that are done or out.
        self._next = 0
        # A heap of ranges that were given back, which come before the ranges from `_next` on.
        self._again: list[int] = []
        # Maps each range that is out to the number of its running functions, which is 0 before the first one.
        self._out: dict[int, int] = {}
        # Ranges with a function that has failed since the range was last taken.
        self._incomplete: set[int] = set()
        # Maps a range to the number of failures of its functions.
        self._failures: dict[int, int] = {}

    @property
    def count_done(self) -> int:
        return self.below + len(self.done)

    @property
    def count_out(self) -> int:
        return len(self._out)

    @property
    def progress(self) -> tuple[int, int, int]:
        """A value that changes whenever a range is done, given back or rolled back."""
        return self.count_done, self.given_back, self.rolled_back

    @property
    def is_over(self) -> bool:
        """Whether all ranges below the limit are done."""
        return self.below >= min(self.limit, self.total)

    def has_next(self, most_out: float = math.inf) -> bool:
        """Returns whether a range can be taken. At most `most_out` ranges may be out."""
        while self._next < self.total and (self.is_done(self._next) or self._next in self._out):
            self._next += 1
        number = self._again[0] if self._again else self._next
        return len(self._out) < most_out and number < min(self.limit, self.total, self.below + WINDOW)

    def next(self, most_out: float = math.inf) -> int | None:
        """Takes the first range that was given back, or else the next range in order. Returns None if there is none."""
        if not self.has_next(most_out):
            return None
        number = heapq.heappop(self._again) if self._again else self._next
        self._incomplete.discard(number)
        self._out[number] = 0
        return number

    def is_done(self, number: int) -> bool:
        return number < self.below or number in self.done

    def is_unscheduled(self, number: int) -> bool:
        """Returns whether a range is out without a scheduled function."""
        return self._out.get(number) == 0

    def check_scheduled(self, taken: dict[int, None]) -> None:
        """Removes ranges with a function from `taken`. Raises RuntimeError if too many are left, or block the loop."""
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
        """Records that a function was scheduled with a range, which may have several functions."""
        self._out[number] = self._out.get(number, 0) + 1
        if number in self._again:
            self._again.remove(number)
            heapq.heapify(self._again)

    def finish(self, number: int) -> None:
        """Records the end of a function. After its last function, a range is done, or comes again if one has failed."""
        if self._remove_function(number):
            if number in self._incomplete:
                self._take_again(number)
            else:
                self._add_done(number)
        if number in self._failures and self.is_done(number):
            del self._failures[number]

    def fail(self, number: int, error: BaseException | None) -> bool:
        """Gives back or skips a range after an `error` or a cancellation (None). Returns True for a skipped range."""
        if error is not None and not isinstance(error, ClosureCancelledError | ParameterServerLost):
            self._failures[number] = failures = self._failures.get(number, 0) + 1
            if self.most_failures is None:
                if not self.strategy_raises or isinstance(error, ClosureQuarantined | WorkerLost):
                    # The strategy does not raise the error, or raises it only when no function is scheduled any longer.
                    self.error = self.error or error
            elif failures >= self.most_failures or isinstance(error, ClosureQuarantined):
                del self._failures[number]
                self.skip(number)
                return True
        self.give_back(number)
        return False

    def give_back(self, number: int) -> None:
        """Records that a function with a range will not finish, or was never scheduled.

        The range comes next again when no other function with the range runs.
        """
        if not self.is_unscheduled(number):
            self._incomplete.add(number)
        if self._remove_function(number):
            self._take_again(number)

    def skip(self, number: int) -> None:
        """Gives a range up. The range counts as done, and is in `skipped`."""
        self._remove_function(number)
        self._incomplete.discard(number)
        if not self.is_done(number):
            self.skipped.add(number)
            self._add_done(number)

    def restore(self, below: int, done: Iterable[int], skipped: Iterable[int] = ()) -> None:
        """Replaces the record of done ranges. Ranges stay out, because their functions run on the restored model."""
        before = self.count_done
        self.below = min(below, self.total)
        # The checkpoint may have more epochs.
        self.done = {number for number in done if self.below <= number < self.total}
        self.skipped = {number for number in skipped if number < self.total}
        self._raise_watermark()
        # If a restore follows a reset, a range that both roll back counts once.
        self.rolled_back = max(0, self.rolled_back + before - self.count_done)
        self._again.clear()
        self._next = self.below

    def _remove_function(self, number: int) -> bool:
        """Removes one function of a range. Returns True if no function is left."""
        remaining = self._out.pop(number, 0) - 1
        if remaining > 0:
            self._out[number] = remaining
        return remaining <= 0

    def _take_again(self, number: int) -> None:
        if not self.is_done(number) and number <= self._next and number not in self._again:
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
