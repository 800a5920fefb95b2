"""The rate at which a function can be called, from rounds of about a given duration."""

import time
from collections.abc import Callable

_FIRST_COUNT = 50
_MOST_CALLS = 100_000


class RateMeter:
    """Measures a rate; the rate of one round decides how many calls the next one has.

    Args:
      run: makes the given number of calls.
      least_rate: the rate that is assumed where a lower one was measured, so that a round never has too few calls.
      first_count: the number of calls that gives the first rate.
      most_calls: of a round.
    """

    def __init__(
        self,
        run: Callable[[int], object],
        least_rate: float = 1.0,
        *,
        first_count: int = _FIRST_COUNT,
        most_calls: int = _MOST_CALLS,
    ) -> None:
        self._run = run
        self._least_rate = least_rate
        self._first_count = first_count
        self._most_calls = most_calls
        self._rate: float | None = None

    def rate(self, seconds: float) -> float:
        """Runs a round of about `seconds`, and returns the calls per second."""
        if self._rate is None:
            # Traces the function and creates its resources before the first round.
            self._run(1)
            self._rate = self._timed(self._first_count)
        count = max(round(max(self._rate, self._least_rate) * seconds), 1)
        self._rate = self._timed(min(count, self._most_calls))
        return self._rate

    def _timed(self, count: int) -> float:
        began = time.perf_counter()
        self._run(count)
        return count / (time.perf_counter() - began)
