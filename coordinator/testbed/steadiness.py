"""What steadies the loss: how unstable trainings were with each value of an axis, all else being equal."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from coordinator.testbed.descent import AXES
from coordinator.testbed.trial_result import TrialResult


@dataclasses.dataclass(frozen=True)
class Steadiness:
    """An axis, and what each of its values did to the same trainings.

    Attributes:
      axis: a name of `AXES`.
      values: of the axis, in the order of the grid.
      rises: the mean rise of the loss with each value, in nats.
      final_losses: the mean final loss with each value.
      trainings: the number of trainings with each value.
    """

    axis: str
    values: tuple[Any, ...]
    rises: tuple[float, ...]
    final_losses: tuple[float, ...]
    trainings: int

    @property
    def effect(self) -> float:
        """By how much the rises with different values differ, in nats."""
        return 0.0 if math.inf == min(self.rises) else max(self.rises) - min(self.rises)

    def __str__(self) -> str:
        steadiest = self.values[int(np.argmin(self.rises))]
        values, rises, losses = (
            ", ".join(texts)
            for texts in (
                [_text(value) for value in self.values],
                [f"{rise:.2f}" for rise in self.rises],
                [f"{loss:.3f}" for loss in self.final_losses],
            )
        )
        return (
            f"{self.axis.replace('_', ' ')}: steadiest with {_text(steadiest)}: rise {rises} with {values}; "
            f"final loss {losses}; means of {self.trainings} trainings each"
        )


def steadiness(results: Sequence[TrialResult]) -> list[Steadiness]:
    """Compares the values of each axis on which a grid has several; the axis with the largest effect is first.

    Only trainings that were made with all values of an axis count for it.
    """
    found = []
    for axis in AXES:
        values = tuple(dict.fromkeys(getattr(each.trial.descent, axis) for each in results))
        if len(values) < 2:
            continue
        # By what they have in common: of each value the result.
        groups: dict[Any, dict[Any, TrialResult]] = {}
        for each in results:
            trial = each.trial
            rest = tuple(getattr(trial.descent, name) for name in AXES if name != axis)
            groups.setdefault((trial.mode, trial.workers, trial.delay, rest), {})[getattr(trial.descent, axis)] = each
        whole = [group for group in groups.values() if len(group) == len(values)]
        if whole:
            rises, losses = (
                tuple(float(np.mean([group[value].mean(figure) for group in whole])) for value in values)
                for figure in ("rise", "final_loss")
            )
            found.append(Steadiness(axis, values, rises, losses, len(whole)))
    return sorted(found, key=lambda each: -each.effect)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}"
