"""Policies for saving and keeping checkpoints, which are pure functions of the history, the step and the time.

A policy for saving has the method `is_due(history, now)`, a policy for keeping has `kept(history, now)`. Users may
write other policies. With several policies, a checkpoint is saved if one is due, and kept if one keeps the checkpoint.

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
    """The step and the time at which a policy is asked.

    Attributes:
      step: the number of the training step.
      time: the time in Unix seconds.
    """

    step: int
    time: float


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint.

    Attributes:
      path: the path as TensorFlow takes it, without `.index`.
      number: the number of the checkpoint, which increases with each checkpoint of a directory.
      step: the training step of the snapshot, or 0 if the step is unknown.
      time: the time of the snapshot, in Unix seconds.
      metrics: the metrics that were measured with the checkpoint, by name.
      written_ns: when the files were written, in Unix nanoseconds of their file system, or 0 if the time is unknown.
    """

    path: str
    number: int
    step: int
    time: float
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    written_ns: int = 0


class SavePolicy(Protocol):
    """A policy for saving."""

    def is_due(self, history: Sequence[SavedCheckpoint], now: Moment) -> bool:
        """Returns whether to save now.

        Args:
          history: the checkpoints, oldest first. The last one was restored, or is the latest that was to be saved.
          now: the present step and time. The step differs from the step of the last checkpoint.
        """


class KeepPolicy(Protocol):
    """A policy for keeping."""

    def kept(self, history: Sequence[SavedCheckpoint], now: Moment) -> Sequence[SavedCheckpoint]:
        """Returns the checkpoints to keep. `history` has the complete checkpoints, oldest first."""


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
        """Returns whether an interval has passed from `before` to `after`. At the beginning, `before` is None."""


class EverySteps(_Every):
    """Saves when a multiple of `steps` has been reached. Keeps the first checkpoint at or after each multiple.

    `latest` limits the kept checkpoints to the newest: `[EverySteps(1000, 1), EverySteps(100, 1), Latest(2)]`.
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
    """Saves immediately, then `minutes` after the last checkpoint. Keeps checkpoints that are at least as far apart.

    The policy keeps the oldest checkpoint and following ones. `latest` limits the kept checkpoints to the newest.
    """

    def __init__(self, minutes: float, latest: int | None = None) -> None:
        check_number("minutes", minutes, above=0, unit="minutes")
        super().__init__(latest)
        self.seconds = 60.0 * minutes

    def _has_passed(self, before: SavedCheckpoint | None, after: Moment | SavedCheckpoint) -> bool:
        # The difference is negative if the clock has been set back.
        return before is None or not 0 <= after.time - before.time < self.seconds


class EveryHours(EveryMinutes):
    """Like `EveryMinutes`, with an interval in hours."""

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
    """Keeps the `count` best checkpoints by a metric. Of two equal checkpoints, the newer one is better.

    The policy does not keep a checkpoint before its metric is known. Until then, `Latest` must keep the checkpoint.

    Args:
      metric: the name of the metric.
      count: the number of checkpoints to keep.
      mode: "min" if lower is better, "max" if higher is better.
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
    """Raises `TypeError` if `policies` is not a sequence of objects with the method `method`."""
    if not isinstance(policies, Sequence) or isinstance(policies, str):
        raise TypeError(f"{name} must be a list of policies, such as [coordinator.checkpoints.{_EXAMPLES[method]}].")
    for policy in policies:
        if isinstance(policy, type) or not callable(getattr(policy, method, None)):
            raise TypeError(
                f"{name} must be a list of policies with a method {method}(history, now), such as "
                f"coordinator.checkpoints.{_EXAMPLES[method]}; got {policy!r}."
            )


_EXAMPLES = {"is_due": "EveryMinutes(10)", "kept": "Latest(3)"}
