"""The own settings of each update rule, with their checks: shared by the rules of a cluster and by their simulation.

The rule `Synchronous` of `coordinator.updates.rules` and the rule of that name in `coordinator.simulation.rules` both
take the fields of `SynchronousSettings`, and so on. `UpdateRule` has the keywords that all
rules of a cluster share. Neither TensorFlow nor NumPy is imported here.

All classes raise when they are created:
  SettingError: a value is out of range; it is a `ValueError`.
  SettingTypeError: a value has the wrong type; it is a `SettingError` and a `TypeError`.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

from coordinator.errors import SettingError
from coordinator.options import SettingTypeError, check_integer, check_number, check_transfer_dtype
from coordinator.updates import decisions

# An int64 above every number of updates.
UNBOUNDED = 2**62


class _Modulated:
    """A base of settings with `lr_staleness_modulation`."""

    lr_staleness_modulation: bool | Callable[..., Any]

    def __post_init__(self) -> None:
        modulation = self.lr_staleness_modulation
        if not (isinstance(modulation, bool) or _takes(modulation, 1) or _takes(modulation, 2)):
            raise SettingTypeError(
                "lr_staleness_modulation",
                f"must be True, False, or a function of the staleness or of staleness and version, got {modulation!r}.",
            )

    @property
    def learning_rate_scale(self) -> Callable[[Any, Any], Any] | None:
        """The function of staleness and version that returns the factor of the learning rate; None for no function."""
        modulation = self.lr_staleness_modulation
        if modulation is False:
            return None
        by_staleness: Any = decisions.learning_rate_scale if modulation is True else modulation
        # Not the version, if the second argument has a default.
        return (lambda staleness, _: by_staleness(staleness)) if _takes(by_staleness, 1) else by_staleness


def _takes(function: Any, number: int) -> bool:
    """Returns whether a function can be called with a number of positional arguments."""
    try:
        inspect.signature(function).bind(*range(number))
    except (TypeError, ValueError):
        return False
    return True


@dataclasses.dataclass(frozen=True)
class RoundingSettings:
    """Settings of the rounding of messages, for all rules; a simulation sends nothing, and has none.

    Attributes:
      transfer_dtype: `tf.bfloat16`; None and `tf.float32` round nothing.
      error_feedback: whether each worker adds to a push what rounding took from its earlier pushes.
    """

    transfer_dtype: Any = None
    error_feedback: bool = False

    def __post_init__(self) -> None:
        check_transfer_dtype("transfer_dtype", self.transfer_dtype)
        if not isinstance(self.error_feedback, bool):
            raise SettingTypeError("error_feedback", f"must be True or False, got {self.error_feedback!r}.")
        if self.error_feedback and self.dtype is None:
            raise SettingError(
                "error_feedback", "needs transfer_dtype=tf.bfloat16, of the rule or of Options: nothing is rounded."
            )

    @property
    def dtype(self) -> Any:
        """The dtype of rounded messages; None if nothing is rounded."""
        return None if self.transfer_dtype is None or self.transfer_dtype.name == "float32" else self.transfer_dtype


@dataclasses.dataclass(frozen=True)
class AsynchronousSettings(_Modulated):
    """Settings of `Asynchronous`.

    Attributes:
      lr_staleness_modulation: False; True, which divides the learning rate by the staleness (arXiv 1511.05950); or a
        function that takes the staleness, or the staleness and the version before the update, and returns the factor of
        the learning rate.
    """

    lr_staleness_modulation: bool | Callable[..., Any] = False


@dataclasses.dataclass(frozen=True)
class StaleSynchronousSettings(_Modulated):
    """Settings of `StaleSynchronous`.

    Attributes:
      get_model_frequency: a worker pulls once in this number of steps; at least 1.
      max_lead: the number of steps that a worker may be ahead of the slowest one, at least 1; None for no limit.
      lr_staleness_modulation: see `AsynchronousSettings`; a worker's local copy is changed with the full rate.
      grads_to_wait: the number of gradients in an update of the shared model, at least 1.
    """

    get_model_frequency: int = 1
    max_lead: int | None = None
    lr_staleness_modulation: bool | Callable[..., Any] = False
    grads_to_wait: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("grads_to_wait", self.grads_to_wait, minimum=1)
        if self.grads_to_wait > 1 and self.lr_staleness_modulation is not False:
            raise SettingError(
                "lr_staleness_modulation", "must be False with grads_to_wait above 1: the gradients of a mean differ."
            )
        check_integer("get_model_frequency", self.get_model_frequency, minimum=1)
        if self.max_lead is not None:
            check_integer("max_lead", self.max_lead, minimum=1, note=" (with 1 the workers run in lockstep)")


@dataclasses.dataclass(frozen=True)
class SynchronousSettings:
    """Settings of `Synchronous`.

    Attributes:
      grads_to_wait: the number of gradients in an update, at least 1. Workers beyond it are backup workers.
    """

    grads_to_wait: int

    def __post_init__(self) -> None:
        check_integer("grads_to_wait", self.grads_to_wait, minimum=1)


@dataclasses.dataclass(frozen=True)
class BoundedDelaySettings:
    """Settings of `BoundedDelay`.

    Attributes:
      max_delay: the largest number of updates between a gradient's pull and its own update, at least 0. None and `inf`
        set no limit: then this is n-softsync (arXiv 1511.05950) with n = workers / grads_to_wait.
      grads_to_wait: the number of gradients in an update, at least 1.
    """

    max_delay: float | None
    grads_to_wait: int = 1

    def __post_init__(self) -> None:
        if self.max_delay is not None and self.max_delay != math.inf:
            check_integer("max_delay", self.max_delay, minimum=0, note=", or inf")
        check_integer("grads_to_wait", self.grads_to_wait, minimum=1)

    @property
    def largest_delay(self) -> int:
        """`max_delay` as an integer; UNBOUNDED if there is no limit."""
        return UNBOUNDED if self.max_delay is None or self.max_delay == math.inf else int(self.max_delay)


@dataclasses.dataclass(frozen=True)
class DelayedSettings:
    """Settings of `Delayed`.

    Attributes:
      delay: seconds, at least 0; `inf` delays until the rule is flushed. Or a function that takes a worker's index and
        the time of the push in seconds, and returns seconds; results below 0 count as 0.
    """

    delay: float | Callable[[Any, Any], Any]

    def __post_init__(self) -> None:
        if not callable(self.delay):
            note = ", or a function of worker and time"
            check_number("delay", self.delay, minimum=0, maximum=math.inf, unit="seconds", note=note)


@dataclasses.dataclass(frozen=True)
class ModelAverageSettings:
    """Settings of `ModelAverage`.

    Attributes:
      period: the least time between two averagings of one worker, in seconds, at least 0.
      warmup_steps: all workers train the shared model until the fastest has finished this number of steps; at least 0.
    """

    period: float = 0.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        check_number("period", self.period, minimum=0, maximum=math.inf, unit="seconds")
        check_integer("warmup_steps", self.warmup_steps, minimum=0)
