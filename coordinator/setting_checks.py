"""Checks of settings that are integers, numbers or dtypes.

The error names the setting, what it must be, and what it was.
"""

import math
import numbers
from typing import Any, TypeGuard

from coordinator.errors import SettingError


class SettingTypeError(SettingError, TypeError):
    """A setting has the wrong type: a `TypeError` too, as Python programs expect."""


def is_integer(value: Any, minimum: int | None = None, maximum: int | None = None) -> TypeGuard[int]:
    """Returns True if a value is an int, not a bool, and within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return (minimum is None or value >= minimum) and (maximum is None or value <= maximum)


def check_integer(name: str, value: Any, minimum: int, maximum: int | None = None, *, note: str = "") -> None:
    """Checks that a setting is an integer within bounds, both included.

    Args:
      name: of the setting.
      value: what it was set to.
      minimum: the lower bound.
      maximum: the upper bound; none by default.
      note: added to the message after the bounds, such as ", or inf" where the caller allows that too.

    Raises:
      SettingError: it is out of bounds, or not an int (then it is a `TypeError` as well).
    """
    if not is_integer(value, minimum, maximum):
        bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        error = SettingError if is_integer(value) else SettingTypeError
        raise error(name, f"must be an integer {bounds}{note}, got {value!r}.")


def check_number(
    name: str,
    value: Any,
    minimum: float | None = None,
    maximum: float | None = None,
    *,
    above: float | None = None,
    unit: str = "",
    note: str = "",
) -> None:
    """Checks that a setting is a number within bounds; NaN never is.

    Args:
      name: of the setting.
      value: what it was set to.
      minimum: a lower bound that is included.
      maximum: an upper bound that is included; `inf` allows `inf`. By default the number must be finite.
      above: a lower bound that is not included.
      unit: for the message, such as "seconds".
      note: see `check_integer`.

    Raises:
      SettingError: it is out of bounds, or not a number (then it is a `TypeError` as well).
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if (
        is_number
        and (minimum is None or value >= minimum)
        and (above is None or value > above)
        and (value < math.inf if maximum is None else value <= maximum)
    ):
        return
    is_bounded = maximum is not None and maximum < math.inf
    if above is not None:
        bounds = f" above {above:g}" + (f" and at most {maximum:g}" if is_bounded else "")
    elif minimum is not None:
        bounds = f" from {minimum:g} to {maximum:g}" if is_bounded else f" of at least {minimum:g}"
    else:
        bounds = ""
    error = SettingError if is_number else SettingTypeError
    raise error(name, f"must be a number{unit and ' of ' + unit}{bounds}{note}, got {value!r}.")


def check_transfer_dtype(name: str, value: Any) -> None:
    """Checks the dtype of messages with variables and gradients: `tf.bfloat16`; None and `tf.float32` round nothing.

    Raises:
      SettingError: it is another dtype, or none (then it is a `TypeError` as well).
    """
    # By its name, since this is imported without TensorFlow.
    found = None if value is None or isinstance(value, str) else getattr(value, "name", None)
    if value is None or found in ("bfloat16", "float32"):
        return
    reason = " (its numbers end at 65,504, and smaller ones than 6e-8 become 0)" if found == "float16" else ""
    error = SettingTypeError if found is None else SettingError
    raise error(name, f"must be tf.bfloat16, tf.float32 or None, got {value!r}{reason}.")
