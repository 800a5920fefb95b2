"""The ranges that a loop was given and with which no function was scheduled yet."""

from coordinator.data.ledger import Ledger

# How many there may be.
MOST_UNSCHEDULED = 1000


class UnscheduledRanges:
    """Those of one loop; to be used with the lock of the ledger held.

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
