"""How long workers stood still although nothing had befallen them."""

import itertools
from collections.abc import Sequence

from coordinator.testing.chaos import Fault


def longest_pause(
    finished_at: Sequence[tuple[float, int]], faults: Sequence[Fault], started_at: float, workers: Sequence[int]
) -> float:
    """The longest time between two results of one worker in which no fault touched it.

    A fault touches its worker from its beginning until the worker's first result after the fault's end; one of a
    parameter server touches all workers so.

    Args:
      finished_at: when each result came, in seconds, and from which worker; in order.
      faults: what was injected, with times that count from `started_at`.
      started_at: on the same clock as the results.
      workers: the workers' indices.

    Returns:
      Seconds; 0 if no worker gave two results in a row.
    """
    pauses = [0.0]
    for worker in workers:
        times = [at for at, who in finished_at if who == worker]
        touching = [
            (started_at + fault.begins, started_at + fault.ends)
            for fault in faults
            if fault.job == "ps" or fault.index == worker
        ]
        for before, after in itertools.pairwise(times):
            # The pause in which a fault ends is the one in which the worker comes back from it.
            if not any(begins <= after and ends >= before for begins, ends in touching):
                pauses.append(after - before)
    return max(pauses)
