"""Rounds that take about as long as wished, whoever runs them."""

import time
from collections.abc import Callable

_FIRST_COUNT = 50
_MOST = 100_000


class Pace:
    """Knows how fast something was the last time, and so how much of it makes a round.

    Args:
      run: does it so many times.
      least_rate: what is taken for the rate if it was lower, so that a round never is of too few.
      first_count: how often it is done to find the rate at first.
    """

    def __init__(
        self, run: Callable[[int], object], least_rate: float = 1.0, *, first_count: int = _FIRST_COUNT
    ) -> None:
        self._run = run
        self._least_rate = least_rate
        self._first_count = first_count
        self._rate: float | None = None

    def rate(self, seconds: float) -> float:
        """Runs a round of about so many seconds, and returns how often it was done in a second."""
        if self._rate is None:
            # Whatever is made once is made now.
            self._run(1)
            self._rate = self._timed(self._first_count)
        count = max(round(max(self._rate, self._least_rate) * seconds), 1)
        self._rate = self._timed(min(count, _MOST))
        return self._rate

    def _timed(self, count: int) -> float:
        began = time.perf_counter()
        self._run(count)
        return count / (time.perf_counter() - began)
