"""Ranges that were handed out and are not done: those without a function, and those whose function has failed.

Plain data structures without a lock or a call to other code, to be used with the lock of the ledger held.
"""

from coordinator.data.ledger import Ledger
from coordinator.errors import ClosureCancelledError, ClosureQuarantined, ParameterServerLost, WorkerLost

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
