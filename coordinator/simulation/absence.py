"""When a worker does not work: pauses, and deaths with or without a return."""

import dataclasses
import math

from coordinator.errors import SettingError


@dataclasses.dataclass(frozen=True)
class Pause:
    """A worker stands still for a while, as a process that is stopped does, and then goes on where it was.

    What it computes takes so much longer; what it has sent is on its way.

    Attributes:
      worker: its index.
      at: when, in seconds from the beginning.
      seconds: for how long.
    """

    worker: int
    at: float
    seconds: float

    def __post_init__(self) -> None:
        _check("pauses", self.at, self.seconds)


@dataclasses.dataclass(frozen=True)
class Death:
    """A worker dies. What it had under way is lost; one that returns begins as a new one.

    Attributes:
      worker: its index.
      at: when, in seconds from the beginning.
      back_after: after how many seconds it is back; `inf` if never.
    """

    worker: int
    at: float
    back_after: float = math.inf

    def __post_init__(self) -> None:
        _check("deaths", self.at, self.back_after)


def _check(option: str, *times: float) -> None:
    if not all(time >= 0 for time in times):
        raise SettingError(option, f"must have times of at least 0, in seconds, got {', '.join(map(repr, times))}.")
