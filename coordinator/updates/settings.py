"""The settings of each update rule, with their checks, for the rules of a cluster and for their simulation.

Both `coordinator.updates.rules` and `coordinator.simulation.rules` have a rule `Synchronous`, which takes the fields of
`SynchronousSettings`, and so on. Rules of a cluster also take some or all keywords of `UpdateRule`. This module imports
neither TensorFlow nor NumPy.

All classes and functions raise when they are called:
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
        """The function (staleness, version) -> factor of the learning rate; None for no function."""
        modulation = self.lr_staleness_modulation
        if modulation is False:
            return None
        by_staleness: Any = decisions.learning_rate_scale if modulation is True else modulation
        # A second parameter with a default value does not take the version.
        return (lambda staleness, _: by_staleness(staleness)) if _takes(by_staleness, 1) else by_staleness


def _takes(function: Any, number: int) -> bool:
    """Returns whether a function can be called with a number of positional arguments."""
    try:
        inspect.signature(function).bind(*range(number))
    except (TypeError, ValueError):
        return False
    return True


def rounding_dtype(transfer_dtype: Any, error_feedback: bool) -> Any:
    """Returns the dtype of a rule's rounded messages; None if nothing is rounded. Simulations send no messages."""
    check_transfer_dtype("transfer_dtype", transfer_dtype)
    if not isinstance(error_feedback, bool):
        raise SettingTypeError("error_feedback", f"must be True or False, got {error_feedback!r}.")
    dtype = None if transfer_dtype is None or transfer_dtype.name == "float32" else transfer_dtype
    if error_feedback and dtype is None:
        raise SettingError(
            "error_feedback", "needs transfer_dtype=tf.bfloat16, of the rule or of Options: nothing is rounded."
        )
    return dtype


@dataclasses.dataclass(frozen=True)
class AsynchronousSettings(_Modulated):
    """Settings of `Asynchronous`."""

    lr_staleness_modulation: bool | Callable[..., Any] = False


@dataclasses.dataclass(frozen=True)
class StaleSynchronousSettings(_Modulated):
    """Settings of `StaleSynchronous`."""

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
    """Settings of `Synchronous`."""

    grads_to_wait: int

    def __post_init__(self) -> None:
        check_integer("grads_to_wait", self.grads_to_wait, minimum=1)


@dataclasses.dataclass(frozen=True)
class BoundedDelaySettings:
    """Settings of `BoundedDelay`."""

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
    """Settings of `Delayed`; the delay is in seconds."""

    delay: float | Callable[[Any, Any], Any]

    def __post_init__(self) -> None:
        if not callable(self.delay):
            note = ", or a function of worker and time"
            check_number("delay", self.delay, minimum=0, maximum=math.inf, unit="seconds", note=note)


@dataclasses.dataclass(frozen=True)
class ModelAverageSettings:
    """Settings of `ModelAverage`; the period is in seconds."""

    period: float = 0.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        check_number("period", self.period, minimum=0, maximum=math.inf, unit="seconds")
        check_integer("warmup_steps", self.warmup_steps, minimum=0)
