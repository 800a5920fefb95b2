"""A distribution as text, such as "lognormal(50ms,0.4)", and what else may stand for one."""

import re
from collections.abc import Callable

from coordinator.errors import SettingError
from coordinator.simulation.distribution import (
    Constant,
    Distribution,
    Empirical,
    Exponential,
    LogNormal,
    Normal,
    Pareto,
)
from coordinator.simulation.quantity import seconds_of

FORMS = (
    "constant(20ms)",
    "normal(50ms,5ms)",
    "exponential(30ms)",
    "lognormal(50ms,0.4)",
    "pareto(20ms,2.5)",
    "empirical(20ms,25ms,90ms)",
)
_CALL = re.compile(r"\s*([a-z]+)\s*\((.*)\)\s*", re.ASCII)


def distribution_of(option: str, given: "Distribution | str | float") -> Distribution:
    """Makes a distribution of what stands for one.

    Args:
      option: what it is for, for the message of an error.
      given: a distribution; a number of seconds; or a text: a time such as "20ms", which is constant, or one of
        constant(time), normal(mean,deviation), exponential(mean), lognormal(median,sigma), pareto(least,shape),
        empirical(time,time,...). Times have a unit: us, ms or s.

    Raises:
      SettingError: it is none of these.
    """
    if isinstance(given, Distribution):
        return given
    if isinstance(given, str):
        return _read(option, given)
    if isinstance(given, bool) or not isinstance(given, int | float) or not given >= 0:
        raise SettingError(option, f"must be a distribution, a text or seconds of at least 0, got {given!r}.")
    return Constant(float(given))


def _read(option: str, text: str) -> Distribution:
    call = _CALL.fullmatch(text)
    if call is None:
        if re.match(r"\s*[\d.]", text):
            return Constant(seconds_of(option, text))
        raise SettingError(option, f"must be a time such as 20ms, or one of {', '.join(FORMS)}; got {text!r}.")
    name, parts = call[1], [part.strip() for part in call[2].split(",")]
    if name == "empirical":
        return Empirical(tuple(seconds_of(option, part) for part in parts))
    if name not in _KINDS:
        raise SettingError(option, f"has no distribution {name!r}; it may be one of {', '.join(FORMS)}.")
    kind, readers = _KINDS[name]
    if len(parts) != len(readers):
        (form,) = (form for form in FORMS if form.startswith(f"{name}("))
        raise SettingError(option, f"must be of the form {form}, got {text!r}.")
    try:
        return kind(*(read(option, part) for read, part in zip(readers, parts, strict=True)))
    except SettingError as error:
        # A field of the distribution is nothing that the user has named.
        raise error if error.option == option else SettingError(option, f"{text!r}: {error}") from None


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SettingError(option, f"has {text!r} where a number without a unit is expected.") from None


_KINDS: dict[str, tuple[Callable[..., Distribution], tuple[Callable[[str, str], float], ...]]] = {
    "constant": (Constant, (seconds_of,)),
    "normal": (Normal, (seconds_of, seconds_of)),
    "exponential": (Exponential, (seconds_of,)),
    "lognormal": (LogNormal, (seconds_of, _number)),
    "pareto": (Pareto, (seconds_of, _number)),
}
