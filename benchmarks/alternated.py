"""Contestants that take turns, so that other load on the machine affects all of them equally."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.rounds import Rounds

# Runs one round and returns the answer of a `ContestantProcess`.
Runner = Callable[[], dict[str, Any]]


def alternated(
    contestants: Mapping[str, Runner], repeats: int, show: Callable[[str], object], warm_up: float = 0.0
) -> dict[str, Rounds]:
    """Runs uncounted rounds of each contestant, then `repeats` counted rounds of each in turn.

    The order is reversed with each repeat, so that none is always the first. A contestant that fails is not run again.

    Args:
      contestants: by name.
      repeats: the number of counted rounds of each.
      show: called with a contestant's name before its uncounted rounds and before each counted one.
      warm_up: the duration of the uncounted rounds, of which there is at least one, in seconds.

    Returns:
      The rounds of each, by name.
    """
    found = {name: Rounds() for name in contestants}
    for repeat in range(repeats + 1):
        for name in contestants if repeat % 2 == 0 else reversed(contestants):
            show(name)
            if found[name].error is not None:
                continue
            answer = contestants[name]() if repeat > 0 else _warm(contestants[name], warm_up)
            if repeat > 0 or "error" in answer:
                found[name].note(answer)
    return found


def _warm(run: Runner, seconds: float) -> dict[str, Any]:
    """Runs rounds for at least `seconds` or until one fails, and returns the answer of the last."""
    began = time.monotonic()
    answer = run()
    while "error" not in answer and time.monotonic() - began < seconds:
        answer = run()
    return answer
