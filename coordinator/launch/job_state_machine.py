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

It starts, signals and waits for nothing itself, so every course of a run can be told in a test as a list of events. It
promises to end: each state that waits for a program to end has a deadline, after which the program is killed; and a
chief that fails is started again a limited number of times, never after somebody interrupted it.
"""

import enum
import signal

from coordinator.launch.job_events import (
    Action,
    Event,
    ProgramEnded,
    Role,
    Say,
    SendSignal,
    ServerEnded,
    ServersFailed,
    ServersReady,
    SignalReceived,
    StartAgain,
    StartPrograms,
    Suspend,
    TimePassed,
)

_INTERRUPTED = 128 + signal.SIGINT
_NOTICE_AFTER = 10.0
_SIGNAL_GRACE = 15.0
_TERMINATE_GRACE = 5.0


class State(enum.Enum):
    """How far the run is."""

    STARTING = enum.auto()
    RUNNING = enum.auto()
    AWAITING_EVALUATOR = enum.auto()
    STOPPING = enum.auto()
    ENDED = enum.auto()


class JobCourse:
    """The course of one run.

    Args:
      roles: the roles that the program has in it.
      evaluator_timeout: how long the evaluator may go on after the chief has ended well, in seconds.
      restarts: how often a chief that fails is started again. The evaluator goes on meanwhile.

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
        """Takes an event and returns what to do about it, in order.

        Args:
          event: what happened.
          now: the time, in seconds of any steady clock; `deadline` is of the same clock.
        """
        match event:
            case ServersReady():
                actions = self._start()
            case ServersFailed(reason):
                actions = self._give_up(reason)
            case ServerEnded(name, log):
                actions = [Say(f"{name} ended by itself; the program goes on without it. Its log: {log}")]
            case SignalReceived(signal.SIGTSTP):
                actions = [Suspend()]
            case SignalReceived(number):
                actions = self._obey(number, now)
            case ProgramEnded(role, code):
                actions = self._program_ended(role, exit_code_of(code), now)
            case TimePassed():
                actions = self._time_passed(now)
        return actions

    def _start(self) -> list[Action]:
        if self.state is not State.STARTING:
            return []
        self.state = State.RUNNING
        self._running = set(self._roles)
        return [StartPrograms()]

    def _give_up(self, reason: str) -> list[Action]:
        if self.state is not State.STARTING:
            return []
        self._end(1)
        return [Say(reason)]

    def _obey(self, number: signal.Signals, now: float) -> list[Action]:
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
            return self._one_less(role, code)
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
        return [Say(notice), StartAgain(Role.CHIEF)]

    def _one_less(self, role: Role, code: int) -> list[Action]:
        if role is Role.EVALUATOR and self.exit_code == 0:
            self.exit_code = code
        if not self._running:
            self._end(self.exit_code)
        return []

    def _evaluator_ended(self, code: int) -> list[Action]:
        self._evaluator_code = code
        if self.state is State.AWAITING_EVALUATOR:
            self._end(code)
        elif code != 0:
            return [Say(f"the evaluator ended with code {code}; training goes on without it.")]
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


def exit_code_of(code: int) -> int:
    """Returns the exit code that a shell would report for a process code, where minus a signal means killed by it."""
    return 128 - code if code < 0 else code


def _ending(code: int) -> str:
    """How a program with this exit code, as a shell reports it, ended."""
    try:
        return f"was ended by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"ended with code {code}"
