"""Contestants that take turns, so that whatever else the machine does meanwhile meets all of them alike."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.rounds import Rounds

# Runs one round and returns the answer of a `ContestantProcess`.
Runner = Callable[[], dict[str, Any]]


def alternated(
    contestants: Mapping[str, Runner], repeats: int, tell: Callable[[str], object], warm_up: float = 0.0
) -> dict[str, Rounds]:
    """Has each contestant run rounds that are not counted, then each in turn so many that are.

    The order is turned round with each repeat, so that nobody is always the first. Who fails is not asked again.

    Args:
      contestants: by name.
      repeats: how many rounds of each are counted.
      tell: called with a contestant's name before each of its rounds that are counted, and once before the others.
      warm_up: for how long rounds are not counted, in seconds; there is one at least.

    Returns:
      The rounds of each, by name.
    """
    found = {name: Rounds() for name in contestants}
    for repeat in range(repeats + 1):
        for name in contestants if repeat % 2 == 0 else reversed(contestants):
            tell(name)
            if found[name].error is not None:
                continue
            answer = contestants[name]() if repeat > 0 else _warm(contestants[name], warm_up)
            if repeat > 0 or "error" in answer:
                found[name].note(answer)
    return found


def _warm(run: Runner, seconds: float) -> dict[str, Any]:
    """Runs rounds until so many seconds are over, or one fails; the answer of the last."""
    began = time.monotonic()
    answer = run()
    while "error" not in answer and time.monotonic() - began < seconds:
        answer = run()
    return answer
