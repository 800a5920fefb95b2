"""What the rounds of one contestant gave."""

import dataclasses
import statistics
from typing import Any


@dataclasses.dataclass
class Rounds:
    """The figures of each round so far, and what ended them early.

    Attributes:
      figures: for each round, its figures by name.
      error: why there are no more rounds; None if nothing went wrong.
    """

    figures: list[dict[str, float]] = dataclasses.field(default_factory=list)
    error: str | None = None

    def note(self, answer: dict[str, Any]) -> None:
        """Takes the answer of a `ContestantProcess`."""
        if "error" in answer:
            self.error = answer["error"]
        else:
            self.figures.append(answer["figures"])

    def median(self, figure: str) -> float | None:
        """The median of a figure; None if an error ended the rounds or there was none."""
        if self.error is not None or not self.figures:
            return None
        return statistics.median(round_[figure] for round_ in self.figures)

    def text(self, figure: str, form: str, scale: float = 1.0) -> str:
        """The median, times `scale`, in a form as for `format`; in its stead what kind of error there was."""
        middle = self.median(figure)
        if middle is None:
            return (self.error or "not run").partition(":")[0]
        return format(middle * scale, form)


def ratio(one: Rounds, other: Rounds, figure: str) -> str:
    """The median of the ratios of the first one's rounds to the other's, as text; a dash if one of them has none.

    Round by round: the two were made one right after the other, on a machine that was as busy then with other things.
    """
    if one.median(figure) is None or other.median(figure) is None:
        return "-"
    pairs = zip(one.figures, other.figures, strict=True)
    return f"{statistics.median(above[figure] / below[figure] for above, below in pairs):.2f}"
