"""What happens in a run (events), and what there is to do about it (actions): the two alphabets of `JobCourse`."""

import dataclasses
import enum
import signal


class Role(enum.Enum):
    """What a copy of the user's program is."""

    CHIEF = "chief"
    EVALUATOR = "evaluator"


@dataclasses.dataclass(frozen=True)
class ServersReady:
    """Every server answers."""


@dataclasses.dataclass(frozen=True)
class ServersFailed:
    """A server did not come up; `reason` says which and why."""

    reason: str


@dataclasses.dataclass(frozen=True)
class ServerEnded:
    """A server ended by itself."""

    name: str
    log: str


@dataclasses.dataclass(frozen=True)
class ProgramEnded:
    """A program ended; a negative code is minus the signal that ended it."""

    role: Role
    code: int


@dataclasses.dataclass(frozen=True)
class SignalReceived:
    """The command was sent a signal."""

    number: signal.Signals


@dataclasses.dataclass(frozen=True)
class TimePassed:
    """The deadline may have passed."""


Event = ServersReady | ServersFailed | ServerEnded | ProgramEnded | SignalReceived | TimePassed


@dataclasses.dataclass(frozen=True)
class StartPrograms:
    """Start the program in each of its roles."""


@dataclasses.dataclass(frozen=True)
class StartAgain:
    """Start the program once more in a role in which it has ended."""

    role: Role


@dataclasses.dataclass(frozen=True)
class SendSignal:
    """Send a signal to every program that runs."""

    number: signal.Signals


@dataclasses.dataclass(frozen=True)
class Suspend:
    """Stop the programs and the command itself until the terminal continues it."""


@dataclasses.dataclass(frozen=True)
class Say:
    """Tell the user."""

    text: str


Action = StartPrograms | StartAgain | SendSignal | Suspend | Say
