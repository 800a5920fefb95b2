"""What `coordinator run` does next: events in, actions out.

    STARTING --servers ready--> RUNNING --chief ends with 0--> AWAITING_EVALUATOR
        |                        ^ |                                 |
        |                        +-+ chief fails, restarts left      |
        |                          |                                 |
        |              signal, or chief fails             signal, or time is up
        |                          |                                 |
        |                          +----------> STOPPING <-----------+
        |                                          |
        +--signal, or a server fails--> ENDED <--no program is left--+

It starts, signals and waits for nothing itself, so that a test gives any run as a list of events. It promises to end:
each state that waits for a program to end has a deadline, after which the program is killed; and a chief that fails is
started again a limited number of times, never after it was interrupted.
"""

import dataclasses
import enum
import signal

_INTERRUPTED = 128 + signal.SIGINT
_NOTICE_AFTER = 10.0
_SIGNAL_GRACE = 15.0
_TERMINATE_GRACE = 5.0


class Role(enum.Enum):
    """The task of a copy of the user's program."""

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
    """The command received a signal."""

    number: signal.Signals


@dataclasses.dataclass(frozen=True)
class TimePassed:
    """The deadline may have passed."""


Event = ServersReady | ServersFailed | ServerEnded | ProgramEnded | SignalReceived | TimePassed


@dataclasses.dataclass(frozen=True)
class StartProgram:
    """Start the program in a role, once more if it has ended there."""

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
    """Report to the user."""

    text: str


Action = StartProgram | SendSignal | Suspend | Say


class State(enum.Enum):
    """How far the run is."""

    STARTING = enum.auto()
    RUNNING = enum.auto()
    AWAITING_EVALUATOR = enum.auto()
    STOPPING = enum.auto()
    ENDED = enum.auto()


class JobStateMachine:
    """The state of one run.

    Args:
      roles: the roles that the program has in it.
      evaluator_timeout: how long the evaluator may run after the chief has ended with code 0, in seconds.
      restarts: how often a chief that fails is started again. The evaluator continues meanwhile.

    Attributes:
      state: how far the run is.
      exit_code: the exit code of the command; it is final when the state is `ENDED`.
      deadline: the time at which `TimePassed` is due, or None.
    """

    def __init__(self, roles: frozenset[Role], evaluator_timeout: float, restarts: int = 0):
        self.state = State.STARTING
        self.exit_code = 0
        self.deadline: float | None = None
        self._roles = roles
        self._running: set[Role] = set()
        self._restarts = restarts
        self._restarted = 0
        self._evaluator_timeout = evaluator_timeout
        self._evaluator_code = 0
        self._evaluator_deadline = 0.0

    def advance(self, event: Event, now: float) -> list[Action]:
        """Handles an event.

        Args:
          event: what happened.
          now: the time in seconds, of any steady clock; `deadline` is of the same clock.

        Returns:
          What to do, in order.
        """
        actions: list[Action] = []
        match event:
            case ServersReady() if self.state is State.STARTING:
                self.state = State.RUNNING
                self._running = set(self._roles)
                actions = [StartProgram(role) for role in Role if role in self._roles]
            case ServersFailed(reason) if self.state is State.STARTING:
                self._end(1)
                actions = [Say(reason)]
            case ServerEnded(name, log):
                actions = [Say(f"{name} ended by itself; the program continues without it. Its log: {log}")]
            case SignalReceived(signal.SIGTSTP):
                actions = [Suspend()]
            case SignalReceived(number):
                actions = self._on_signal(number, now)
            case ProgramEnded(role, code):
                # As a shell reports the code of a program that a signal ended.
                actions = self._program_ended(role, 128 - code if code < 0 else code, now)
            case TimePassed():
                actions = self._time_passed(now)
        return actions

    def _on_signal(self, number: signal.Signals, now: float) -> list[Action]:
        if self.state is State.STARTING:
            self._end(128 + number)
            return []
        if self.state is State.STOPPING:
            return [Say("killing the program."), SendSignal(signal.SIGKILL)]
        self._stop(128 + number, now + _SIGNAL_GRACE)
        notice = f"{number.name}: the program may end within {_SIGNAL_GRACE:.0f} s; once more kills it."
        return [Say(notice), SendSignal(number)]

    def _program_ended(self, role: Role, code: int, now: float) -> list[Action]:
        self._running.discard(role)
        if self.state is State.STOPPING:
            if role is Role.EVALUATOR and self.exit_code == 0:
                self.exit_code = code
            if not self._running:
                self._end(self.exit_code)
            return []
        if role is Role.EVALUATOR:
            return self._evaluator_ended(code)
        if code not in (0, _INTERRUPTED) and self._restarted < self._restarts:
            return self._start_again(code)
        if code != 0 and self._running:
            self._stop(code, now + _TERMINATE_GRACE)
            return [Say(f"the chief ended with code {code}: ending the evaluator."), SendSignal(signal.SIGTERM)]
        if self._running:
            self.state = State.AWAITING_EVALUATOR
            self.deadline = now + min(_NOTICE_AFTER, self._evaluator_timeout)
            self._evaluator_deadline = now + self._evaluator_timeout
            return []
        self._end(code or self._evaluator_code)
        return []

    def _start_again(self, code: int) -> list[Action]:
        self._restarted += 1
        self._running.add(Role.CHIEF)
        notice = f"the chief {_ending(code)}: starting it again, restart {self._restarted} of {self._restarts}."
        return [Say(notice), StartProgram(Role.CHIEF)]

    def _evaluator_ended(self, code: int) -> list[Action]:
        self._evaluator_code = code
        if self.state is State.AWAITING_EVALUATOR:
            self._end(code)
        elif code != 0:
            return [Say(f"the evaluator ended with code {code}; training continues without it.")]
        return []

    def _time_passed(self, now: float) -> list[Action]:
        if self.deadline is None or now < self.deadline:
            return []
        if self.state is State.STOPPING:
            self.deadline = None
            return [Say("the program did not end in time: killing it."), SendSignal(signal.SIGKILL)]
        if now < self._evaluator_deadline:
            self.deadline = self._evaluator_deadline
            left = self._evaluator_deadline - now
            return [Say(f"training has finished; waiting for the evaluator to end, at most {left:.0f} s more.")]
        self._stop(0, now + _TERMINATE_GRACE)
        notice = f"the evaluator has not ended within {self._evaluator_timeout:g} s of the chief: terminating it."
        return [Say(notice), SendSignal(signal.SIGTERM)]

    def _stop(self, exit_code: int, deadline: float) -> None:
        self.state = State.STOPPING
        self.exit_code = exit_code
        self.deadline = deadline

    def _end(self, exit_code: int) -> None:
        self.state = State.ENDED
        self.exit_code = exit_code
        self.deadline = None


def _ending(code: int) -> str:
    """Returns how a program ended whose exit code a shell reports as this."""
    try:
        return f"was ended by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"ended with code {code}"
