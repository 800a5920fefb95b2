"""The rounds of one contestant."""

import dataclasses
import statistics
from typing import Any


@dataclasses.dataclass
class Rounds:
    """The figures of each round so far, and the error that ended them.

    Attributes:
      figures: for each round, its figures by name.
      error: the error that ended the rounds; None without one.
    """

    figures: list[dict[str, float]] = dataclasses.field(default_factory=list)
    error: str | None = None

    def note(self, answer: dict[str, Any]) -> None:
        """Adds an answer of a `ContestantProcess`."""
        if "error" in answer:
            self.error = answer["error"]
        else:
            self.figures.append(answer["figures"])

    def median(self, figure: str) -> float | None:
        """Returns the median of a figure; None if an error ended the rounds or there was no round."""
        if self.error is not None or not self.figures:
            return None
        return statistics.median(round_[figure] for round_ in self.figures)

    def text(self, figure: str, form: str, scale: float = 1.0) -> str:
        """Returns the median times `scale`, formatted by `form`; the kind of error where there is none."""
        middle = self.median(figure)
        if middle is None:
            return (self.error or "not run").partition(":")[0]
        return format(middle * scale, form)


def ratio(one: Rounds, other: Rounds, figure: str) -> str:
    """Returns the median of the ratios of one's rounds to the other's, as text; a dash if one of them has none.

    The ratios are of rounds that ran one right after the other, under the same other load of the machine.
    """
    if one.median(figure) is None or other.median(figure) is None:
        return "-"
    pairs = zip(one.figures, other.figures, strict=True)
    return f"{statistics.median(above[figure] / below[figure] for above, below in pairs):.2f}"
