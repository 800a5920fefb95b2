"""The table of the rates of all sides of a contest."""

from collections.abc import Sequence

from benchmarks.contest import Found
from benchmarks.rounds import ratio
from coordinator.simulation.result import aligned


def rate_table(unit: str, columns: Sequence[str], ratios: Sequence[tuple[str, str]], found: Found) -> str:
    """Returns a row for each row of a contest: the medians of `rate`, and the ratios of pairs of columns.

    Args:
      unit: the unit of the rates, for the head.
      columns: the columns with rates.
      ratios: pairs of columns.
      found: the rounds of a contest.
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
