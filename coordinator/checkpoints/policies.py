"""When to save a checkpoint, and which ones to keep: pure functions of the history and of the present moment.

A policy for saving has `is_due(history, now)`, one for keeping `kept(history, now)`; users may write their own. A
checkpoint is saved if one of several policies is due, and kept if one of them keeps it.

Source: the save decision and preservation policies of Orbax, `tf.train.CheckpointManager`.
"""

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from coordinator.options import check_integer, check_number


@dataclasses.dataclass(frozen=True)
class Moment:
    """The present moment.

    Attributes:
      step: the number of the training step.
      time: in Unix seconds.
    """

    step: int
    time: float


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint.

    Attributes:
      path: as TensorFlow takes it, without `.index`.
      number: increases with each checkpoint of a directory.
      step: the training step at its snapshot; 0 if that is unknown.
      time: of the snapshot, in Unix seconds.
      metrics: what was measured with it, by name.
      written_ns: when its files were written, in Unix nanoseconds of their file system; 0 if that is unknown.
    """

    path: str
    number: int
    step: int
    time: float
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    written_ns: int = 0


class SavePolicy(Protocol):
    """When to save."""

    def is_due(self, history: Sequence[SavedCheckpoint], now: Moment) -> bool:
        """Returns whether to save now.

        Args:
          history: oldest first. The last one is what training continued from or tried to save last.
          now: the present moment, of another step than the last checkpoint.
        """


class KeepPolicy(Protocol):
    """Which checkpoints to keep."""

    def kept(self, history: Sequence[SavedCheckpoint], now: Moment) -> Sequence[SavedCheckpoint]:
        """Returns the kept checkpoints of the history, which has complete ones, oldest first."""


class _Every(abc.ABC):
    """Saves at intervals, and keeps the first checkpoint of each interval."""

    def __init__(self, latest: int | None) -> None:
        if latest is not None:
            check_integer("latest", latest, minimum=1)
        self.latest = latest

    def is_due(self, history: Sequence[SavedCheckpoint], now: Moment) -> bool:
        """Returns whether an interval has passed since the last checkpoint."""
        return self._has_passed(history[-1] if history else None, now)

    def kept(self, history: Sequence[SavedCheckpoint], now: Moment) -> Sequence[SavedCheckpoint]:
        """Returns the first checkpoint of each interval, or the newest `latest` of them."""
        del now
        firsts: list[SavedCheckpoint] = []
        for checkpoint in history:
            if not firsts or self._has_passed(firsts[-1], checkpoint):
                firsts.append(checkpoint)
        return firsts if self.latest is None else firsts[-self.latest :]

    @abc.abstractmethod
    def _has_passed(self, before: SavedCheckpoint | None, after: Moment | SavedCheckpoint) -> bool:
        """Returns whether an interval lies between two moments; `before` is None at the beginning."""


class EverySteps(_Every):
    """Saves when a multiple of `steps` has been reached; keeps the first checkpoint from each multiple on.

    It keeps only the newest `latest` of these, if given: `[EverySteps(1000, 1), EverySteps(100, 1), Latest(2)]`.
    """

    def __init__(self, steps: int, latest: int | None = None) -> None:
        check_integer("steps", steps, minimum=1)
        super().__init__(latest)
        self.steps = steps

    def _has_passed(self, before: SavedCheckpoint | None, after: Moment | SavedCheckpoint) -> bool:
        # A step may be less than before if an older checkpoint was restored.
        former = 0 if before is None else before.step
        return after.step // self.steps != former // self.steps or after.step < former


class EveryMinutes(_Every):
    """Saves `minutes` after the last checkpoint, the first one immediately; keeps checkpoints at least as far apart.

    It keeps the oldest checkpoint and following ones; only the newest `latest` of these, if given.
    """

    def __init__(self, minutes: float, latest: int | None = None) -> None:
        check_number("minutes", minutes, above=0, unit="minutes")
        super().__init__(latest)
        self.seconds = 60.0 * minutes

    def _has_passed(self, before: SavedCheckpoint | None, after: Moment | SavedCheckpoint) -> bool:
        # The clock may have been set back.
        return before is None or not 0 <= after.time - before.time < self.seconds


class EveryHours(EveryMinutes):
    """As `EveryMinutes`, in hours."""

    def __init__(self, hours: float, latest: int | None = None) -> None:
        check_number("hours", hours, above=0, unit="hours")
        super().__init__(60.0 * hours, latest)


class Latest:
    """Keeps the newest `count` checkpoints."""

    def __init__(self, count: int) -> None:
        check_integer("count", count, minimum=1)
        self.count = count

    def kept(self, history: Sequence[SavedCheckpoint], now: Moment) -> Sequence[SavedCheckpoint]:
        """Returns the newest `count` checkpoints, oldest first."""
        del now
        return history[-self.count :]


class Best:
    """Keeps the best `count` checkpoints by a metric, the newer of equal ones.

    It does not keep a checkpoint whose metric is not known yet: `Latest` must keep it until then.

    Args:
      metric: its name.
      count: how many.
      mode: "min" if lower is better, "max" if higher is.
    """

    def __init__(self, metric: str, count: int = 1, mode: Literal["min", "max"] = "min") -> None:
        check_integer("count", count, minimum=1)
        if mode not in ("min", "max"):
            raise ValueError(f'mode must be "min" or "max", got {mode!r}.')
        if not isinstance(metric, str):
            raise TypeError(f"metric must be the name of a metric, got {metric!r}.")
        self.metric, self.count, self.mode = metric, count, mode

    def kept(self, history: Sequence[SavedCheckpoint], now: Moment) -> Sequence[SavedCheckpoint]:
        """Returns at most `count` checkpoints whose metric is known, best first."""
        del now
        measured = [known for known in history if not math.isnan(known.metrics.get(self.metric, math.nan))]
        sign = 1 if self.mode == "min" else -1
        return sorted(measured, key=lambda known: (sign * known.metrics[self.metric], -known.number))[: self.count]


def check_policies(name: str, policies: Sequence[Any], method: str) -> None:
    """Raises `TypeError` if `policies` is not a sequence of objects with a method."""
    if not isinstance(policies, Sequence) or isinstance(policies, str):
        raise TypeError(f"{name} must be a list of policies, such as [coordinator.checkpoints.{_EXAMPLES[method]}].")
    for policy in policies:
        if isinstance(policy, type) or not callable(getattr(policy, method, None)):
            raise TypeError(
                f"{name} must be a list of policies with a method {method}(history, now), such as "
                f"coordinator.checkpoints.{_EXAMPLES[method]}; got {policy!r}."
            )


_EXAMPLES = {"is_due": "EveryMinutes(10)", "kept": "Latest(3)"}
