"""One cell of the grid: a mode, how many workers, and how late their gradients are; and which cells a grid has."""

import dataclasses
from collections.abc import Sequence

SEQUENTIAL, SYNCHRONOUS, ASYNCHRONOUS = MODES = ("sequential", "synchronous", "asynchronous")


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is trained once.

    Attributes:
      mode: one of `MODES`.
      workers: how many take part.
      delay: of gradients, in seconds; 0 unless the mode is asynchronous.
    """

    mode: str
    workers: int
    delay: float = 0.0

    def __str__(self) -> str:
        if self.mode == SEQUENTIAL:
            return self.mode
        workers = f"{self.mode}, {worker_count(self.workers)}"
        return f"{workers}, delay {self.delay:g} s" if self.mode == ASYNCHRONOUS else workers


def worker_count(workers: int) -> str:
    """So many workers, in words."""
    return f"{workers} worker{'s' * (workers > 1)}"


def grid(modes: Sequence[str], workers: Sequence[int], delays: Sequence[float]) -> list[Cell]:
    """The cells of all combinations, each once.

    The sequential mode has one cell: one worker, no delay. The synchronous mode has no delays, because workers wait for
    each other's gradients and none is ever stale; with one worker it is the sequential mode, and left out.
    """
    cells = [Cell(SEQUENTIAL, 1)] if SEQUENTIAL in modes else []
    if SYNCHRONOUS in modes:
        cells += [Cell(SYNCHRONOUS, count) for count in workers if count > 1]
    if ASYNCHRONOUS in modes:
        cells += [Cell(ASYNCHRONOUS, count, delay) for count in workers for delay in delays]
    return cells
