"""The rates of all sides of a contest beside one another."""

from collections.abc import Sequence

from benchmarks.contest import Found
from benchmarks.rounds import ratio
from coordinator.simulation.aligned_table import aligned


def rate_table(unit: str, columns: Sequence[str], ratios: Sequence[tuple[str, str]], found: Found) -> str:
    """A row for each one found: the medians of `rate`, and the ratios of the columns that are named.

    Args:
      unit: what the rates are, for the head.
      columns: those of the rates.
      ratios: pairs of them.
      found: what a contest found.
    """
    rows = [
        (
            row,
            *(rounds[column].text("rate", ",.0f") for column in columns),
            *(ratio(rounds[one], rounds[other], "rate") for one, other in ratios),
        )
        for row, rounds in found.items()
    ]
    return aligned((unit, *columns, *(f"{one} / {other}" for one, other in ratios)), rows)
