"""How a rate and reported values change over all of training, in bounded memory.

The periods are of equal length. When there are too many of them, each two become one, so that a run of a minute shows
its seconds, and a run of a week still its whole course.
"""

import math

from coordinator.dashboard.snapshot import History

# An even number.
_MOST_PERIODS = 600
_FIRST_PERIOD = 1.0
# Names of values; further ones are left out.
_MOST_NAMES = 8


class HistoryRecorder:
    """Collects the finished closures and the reported values of each period.

    Args:
      started: the time from which the periods are counted.
    """

    def __init__(self, started: float) -> None:
        self._period = _FIRST_PERIOD
        self._began = started
        self._finished = 0
        self._sums: dict[str, tuple[float, int]] = {}
        self._times: list[float] = []
        self._rates: list[float] = []
        self._columns: dict[str, list[float | None]] = {}
        self.latest: dict[str, float] = {}

    def report(self, name: str, value: float) -> None:
        """Adds a value to the present period. Those that are no numbers are not drawn, and not added."""
        if not math.isfinite(value) or (name not in self.latest and len(self.latest) >= _MOST_NAMES):
            return
        self.latest[name] = value
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = total + value, count + 1

    def advance(self, now: float, finished: int) -> None:
        """Ends the present period if it is over.

        Args:
          now: the present time.
          finished: how many closures have finished since the strategy was created.
        """
        seconds = now - self._began
        if seconds < self._period:
            return
        self._times.append(now)
        self._rates.append((finished - self._finished) / seconds)
        for name in self._sums:
            self._columns.setdefault(name, [None] * (len(self._times) - 1))
        for name, column in self._columns.items():
            total, count = self._sums.get(name, (0.0, 0))
            column.append(total / count if count else None)
        self._began, self._finished, self._sums = now, finished, {}
        if len(self._times) == _MOST_PERIODS:
            self._halve()

    def history(self) -> History:
        """Returns the periods that have ended."""
        values = {name: tuple(column) for name, column in self._columns.items()}
        return History(tuple(self._times), tuple(self._rates), values)

    def _halve(self) -> None:
        self._period *= 2
        self._times = self._times[1::2]
        self._rates = [(first + second) / 2 for first, second in zip(self._rates[::2], self._rates[1::2], strict=True)]
        self._columns = {name: _halved(column) for name, column in self._columns.items()}


def _halved(column: list[float | None]) -> list[float | None]:
    """Returns the mean of each two values; of those that are not None."""
    halved: list[float | None] = []
    for pair in zip(column[::2], column[1::2], strict=True):
        known = [value for value in pair if value is not None]
        halved.append(sum(known) / len(known) if known else None)
    return halved
