"""Times, sizes, rates and shares as people write them: "50ms", "100MB", "10Gbit", "5%".

A text of another form raises a `SettingError` with the option that it was given for, and what is allowed.
"""

import re
from collections.abc import Callable
from typing import Any

from coordinator.errors import SettingError

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
_BYTES_PER_SECOND = {"Mbit": 1e6 / 8, "Gbit": 1e9 / 8, "MB": 1e6, "GB": 1e9}
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%]*)\s*", re.ASCII)


def parse_seconds(option: str, text: str) -> float:
    """Returns a time such as "200us", "50ms" or "1.5s" in seconds."""
    return _parse(option, text, _SECONDS, "a time of at least 0 with its unit, such as 200us, 50ms or 1.5s")


def parse_plain_seconds(option: str, text: str) -> float:
    """Returns a time in seconds, whose unit may be left out if it is seconds: "0.1" is "0.1s" and "100ms"."""
    return _parse(
        option, text, {**_SECONDS, "": 1.0}, "a time of at least 0, in seconds or with its unit: 0.5 or 500ms"
    )


def parse_bytes(option: str, text: str) -> float:
    """Returns a size such as "4MB" (MB: a million bytes) in bytes."""
    return _parse(option, text, _BYTES, "a size with its unit, such as 500kB, 100MB or 1.5GB")


def parse_rate(option: str, text: str) -> float:
    """Returns a rate per second such as "10Gbit" or "100MB" in bytes per second; "inf" is no limit."""
    if text.strip() == "inf":
        return float("inf")
    return _parse(option, text, _BYTES_PER_SECOND, "a rate per second with its unit, such as 10Gbit or 100MB, or inf")


def parse_share(option: str, text: str) -> float:
    """Returns a share such as "5%" or "0.05" as a number from 0 to 1."""
    share = _parse(option, text, {"%": 0.01, "": 1.0}, "a share from 0% to 100%, such as 5% or 0.05")
    if share > 1:
        raise SettingError(option, f"must be a share from 0% to 100%, such as 5% or 0.05, got {text!r}.")
    return share


def parse_number(kind: Callable[[Any], float], expected: str, option: str, text: Any) -> Any:
    """Returns a number of a kind, `int` or `float`, which an error describes as expected."""
    try:
        return kind(text)
    except ValueError:
        raise SettingError(option, f"must be {expected}, got {text!r}.") from None


def format_seconds(seconds: float) -> str:
    """Returns a time in seconds as text with a suitable unit, such as "50 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us" if seconds else "0 s"


def _parse(option: str, text: str, units: dict[str, float], expected: str) -> float:
    match = _NUMBER.fullmatch(text)
    # Zero needs no unit.
    if match and (match[2] in units or (not match[2] and float(match[1]) == 0)):
        return float(match[1]) * units.get(match[2], 1.0)
    raise SettingError(option, f"must be {expected}, got {text!r}.")
