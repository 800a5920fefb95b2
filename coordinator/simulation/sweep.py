"""One setting that takes several values: "workers=1..512" doubles from 1 to 512, "workers=1,8,32" lists."""

import dataclasses
import re

from coordinator.errors import SettingError

NAMES = ("workers", "ps", "grads_to_wait", "max_delay", "max_lead", "get_model_frequency")
_RANGE = re.compile(r"(\d+)\.\.(\d+)", re.ASCII)
_LIST = re.compile(r"\d+(,\d+)*", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A setting and its values.

    Attributes:
      name: one of `NAMES`.
      values: growing, at least one.
    """

    name: str
    values: tuple[int, ...]


def sweep_of(text: str) -> Sweep:
    """Reads a sweep.

    Raises:
      SettingError: it is none.
    """
    name, _, rest = text.partition("=")
    name = name.strip().replace("-", "_")
    if name not in NAMES:
        raise SettingError("sweep", f"must be of one of {', '.join(NAMES)}, as in workers=1..512; got {text!r}.")
    if (ends := _RANGE.fullmatch(rest)) and int(ends[1]) <= int(ends[2]):
        return Sweep(name, _doubling(int(ends[1]), int(ends[2])))
    if _LIST.fullmatch(rest):
        return Sweep(name, tuple(sorted({int(value) for value in rest.split(",")})))
    raise SettingError("sweep", f"must have values such as {name}=1..512 or {name}=1,8,32; got {text!r}.")


def _doubling(first: int, last: int) -> tuple[int, ...]:
    values = [first]
    while values[-1] < last:
        values.append(min(max(2 * values[-1], 1), last))
    return tuple(values)
