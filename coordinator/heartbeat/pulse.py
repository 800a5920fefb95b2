"""What a heartbeat knows of one server."""

import dataclasses
import enum


class PulseState(enum.Enum):
    """Whether a server answers, and if not, whether its connections still look alive."""

    UNKNOWN = "unknown"
    ANSWERING = "answering"
    GONE = "gone"
    SILENT = "silent"


@dataclasses.dataclass(frozen=True)
class Pulse:
    """The state of one server, since some time.

    Attributes:
      state: ANSWERING; GONE, when connections to it are refused or something else answers; SILENT, when it neither
        answers nor refuses: frozen, or its host is gone; UNKNOWN, until the first probe has ended.
      incarnation: the number that the server drew when it started; None unless it is ANSWERING.
      since: when it came to be so, in seconds on the clock of `time.monotonic`.
    """

    state: PulseState
    incarnation: int | None = None
    since: float = 0.0
