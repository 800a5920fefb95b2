"""Decides what a launcher starts, restarts and ends: each event is a call that causes calls of a `Job`.

    STARTING --servers ready--> RUNNING --chief ends with 0--> AWAITING_EVALUATOR
        |                        ^ |                                 |
        |                        +-+ chief fails, restarts left      |
        |                          |                                 |
        |              signal, or chief fails             signal, or time is up
        |                          |                                 |
        |                          +----------> STOPPING <-----------+
        |                                          |
        +--signal, or a server fails--> ENDED <--no program is left--+

On Slurm each task has its own state machine, which is told of the chief's end even in a task without the chief.

The state machine never waits, so a test can describe any run as a sequence of calls. Guarantee: each run ends.

- Each state that waits for a program's end has a deadline, after which the program is killed.
- A failed chief and a server that ends are restarted a few times, never after an interruption; an evaluator never is.
- A server that has served is restarted even while other servers still start.
- A server that ends soon after a restart is restarted with a growing delay.
- In the first minutes after the loss of a server, failed restarts on its unreachable host do not count.
"""

import collections
import enum
import math
import queue
import signal
import time
from collections.abc import Callable, Collection
from typing import Protocol

_INTERRUPTED = 128 + signal.SIGINT
# If one of these signals is typed again in a terminal, it kills the program. Other signals do not kill the program when
# they are repeated, because a scheduler may repeat them.
_IMPATIENT = (signal.SIGINT, signal.SIGQUIT)
_NOTICE_AFTER = 10.0
_SIGNAL_GRACE = 15.0
_TERMINATE_GRACE = 5.0
# A server that has run for this many seconds after its last restart is restarted without a delay.
_STABLE_AFTER = 60.0
# Other restarts are delayed by 1, 2, 4, ... seconds, at most a minute.
_SHORTEST_DELAY, _LONGEST_DELAY = 1.0, 60.0
# For how many seconds after the loss of a server its failed restarts do not count. The server's host may be booting, or
# the server has only lost its connection and still holds the port, which it does for five minutes.
_HOST_TIMEOUT = 600.0


class Role(enum.Enum):
    """The task of a copy of the user's program."""

    CHIEF = "chief"
    EVALUATOR = "evaluator"


class Job(Protocol):
    """Carries out the decisions of a state machine."""

    def report(self, text: str) -> None:
        """Reports to the user."""

    def start(self, role: Role) -> None:
        """Starts the program in a role; restarts a program that has ended."""

    def start_server(self, name: str) -> None:
        """Restarts a server that has ended, on the same port."""

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to every running program."""

    def suspend(self) -> None:
        """Stops the programs and the command itself until the terminal continues the command."""


class State(enum.Enum):
    """The progress of a run."""

    STARTING = enum.auto()
    RUNNING = enum.auto()
    AWAITING_EVALUATOR = enum.auto()
    STOPPING = enum.auto()
    ENDED = enum.auto()


class JobStateMachine:
    """The state of one run. Times are in seconds.

    Args:
      job: carries out the decisions.
      roles: the roles of the program.
      evaluator_timeout: how long the evaluator may run after the chief has ended with code 0.
      restarts: how often a failed chief is restarted, while the evaluator continues.
      server_restarts: how often each server is restarted.
      clock: returns the time.

    `exit_code` is final in the state `ENDED`. `given_up` has the names of servers that have ended and are not
    restarted; other threads may read `given_up`.
    """

    def __init__(
        self,
        job: Job,
        roles: Collection[Role],
        evaluator_timeout: float,
        restarts: int,
        server_restarts: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.state = State.STARTING
        self.exit_code = 0
        self.given_up: set[str] = set()
        self._deadline = math.inf
        self._job = job
        self._roles = roles
        self._running: set[Role] = set()
        self._restarts = restarts
        self._restarted = 0
        self._server_restarts = server_restarts
        self._servers_restarted: collections.Counter[str] = collections.Counter()
        # Name of a server that has served -> the time at which the server was lost.
        self._lost: dict[str, float] = {}
        # Name of a server -> the time and the delay of its last restart.
        self._last_restart: dict[str, tuple[float, float]] = {}
        # Name of a server -> the time at which its next restart is due.
        self._due: dict[str, float] = {}
        self._evaluator_timeout = evaluator_timeout
        self._evaluator_code = 0
        self._evaluator_deadline = 0.0
        self._clock = clock

    @property
    def deadline(self) -> float:
        """The time at which `time_passed` is due, or infinity."""
        return min(self._deadline, *self._due.values(), math.inf)

    def servers_ready(self) -> None:
        """Starts the programs, because every server answers except servers that were given up."""
        if self.state is State.STARTING:
            self.state = State.RUNNING
            self._running = set(self._roles)
            for role in self._roles:
                self._job.start(role)

    def servers_failed(self, reason: str) -> None:
        """Ends the run because a server did not start; `reason` says which server and why."""
        if self.state is State.STARTING:
            self._end(1)
            self._job.report(reason)

    def server_ended(self, name: str, ending: str, consequence: str, log: str = "", *, has_served: bool = True) -> None:
        """Restarts a server that ended unexpectedly, or reports the `consequence`.

        `ending` says how the server ended, such as `by SIGKILL`; `log` is a path or "". `has_served` is False if the
        last start failed, perhaps because the host cannot be reached.
        """
        now = self._clock()
        if has_served:
            self._lost[name] = now
        is_counted = has_served or now - self._lost.get(name, -math.inf) > _HOST_TIMEOUT
        what, end = f"{name} ended unexpectedly, {ending}", f". Its log: {log}" if log else "."
        is_needed = self.state not in (State.STOPPING, State.ENDED)
        if not is_needed or (is_counted and self._servers_restarted[name] >= self._server_restarts):
            self.given_up.add(name)
            self._job.report(f"{what}; {consequence}{end}")
            return
        self._servers_restarted[name] += is_counted
        still = "" if is_counted else "still "
        count = f"{still}restart {self._servers_restarted[name]} of {self._server_restarts}"
        last, delay = self._last_restart.get(name, (-math.inf, 0.0))
        delay = 0.0 if now - last > _STABLE_AFTER else min(max(_SHORTEST_DELAY, 2 * delay), _LONGEST_DELAY)
        self._last_restart[name] = now + delay, delay
        when = f" in {delay:g} s" if delay else ""
        self._job.report(f"{what}: starting it again{when}, {count}{end}")
        if delay:
            self._due[name] = now + delay
        else:
            self._job.start_server(name)

    def signal_received(self, number: signal.Signals) -> None:
        """Passes on a signal that the command received, or ends the run."""
        if number is signal.SIGTSTP:
            self._job.suspend()
        elif self.state is State.STARTING:
            self._end(128 + number)
        elif self.state is not State.STOPPING:
            self._stop(128 + number, _SIGNAL_GRACE)
            self._job.report(f"{number.name}: the program has {_SIGNAL_GRACE:.0f} s to exit; Ctrl-C kills it now.")
            self._job.send(number)
        elif number in _IMPATIENT:
            self._job.report("killing the program.")
            self._job.send(signal.SIGKILL)

    def program_ended(self, role: Role, code: int) -> None:
        """Decides what follows a program's end; a negative code is minus the signal that ended the program."""
        # A shell reports the signal n as 128 + n.
        code = 128 - code if code < 0 else code
        self._running.discard(role)
        if self.state is State.STOPPING:
            if role is Role.EVALUATOR and self.exit_code == 0:
                self.exit_code = code
            if not self._running:
                self._end(self.exit_code)
        elif role is Role.CHIEF:
            self._chief_ended(code)
        elif self.state is State.AWAITING_EVALUATOR:
            self._end(code)
        else:
            self._evaluator_code = code
            if code != 0:
                self._job.report(f"the evaluator ended with code {code}; training continues without it.")

    def time_passed(self) -> None:
        """Decides what follows if a deadline has passed."""
        now = self._clock()
        for name in [name for name, due in self._due.items() if due <= now]:
            del self._due[name]
            self._job.start_server(name)
        if now < self._deadline:
            return
        if self.state is State.STOPPING:
            self._deadline = math.inf
            self._job.report("the program did not end in time: killing it.")
            self._job.send(signal.SIGKILL)
        elif now < self._evaluator_deadline:
            self._deadline = self._evaluator_deadline
            left = self._evaluator_deadline - now
            self._job.report(f"training has finished; waiting for the evaluator to end, at most {left:.0f} s more.")
        else:
            self._stop(0, _TERMINATE_GRACE)
            notice = f"the evaluator has not ended within {self._evaluator_timeout:g} s of the chief: terminating it."
            self._job.report(notice)
            self._job.send(signal.SIGTERM)

    def _chief_ended(self, code: int) -> None:
        if code not in (0, _INTERRUPTED) and self._restarted < self._restarts:
            self._restarted += 1
            self._running.add(Role.CHIEF)
            notice = f"the chief {_ending(code)}: starting it again, restart {self._restarted} of {self._restarts}."
            self._job.report(notice)
            self._job.start(Role.CHIEF)
        elif not self._running:
            self._end(code or self._evaluator_code)
        elif code != 0:
            self._stop(code, _TERMINATE_GRACE)
            self._job.report(f"the chief ended with code {code}: ending the evaluator.")
            self._job.send(signal.SIGTERM)
        else:
            self.state = State.AWAITING_EVALUATOR
            now = self._clock()
            self._deadline = now + min(_NOTICE_AFTER, self._evaluator_timeout)
            self._evaluator_deadline = now + self._evaluator_timeout

    def _stop(self, exit_code: int, grace: float) -> None:
        self._end(exit_code, State.STOPPING, self._clock() + grace)

    def _end(self, exit_code: int, state: State = State.ENDED, deadline: float = math.inf) -> None:
        self.state, self.exit_code, self._deadline = state, exit_code, deadline
        self._due.clear()


def run_to_end(machine: JobStateMachine, events: "queue.SimpleQueue[Callable[[], None]]") -> None:
    """Makes the queued calls, and calls `time_passed` at each deadline, until the run has ended."""
    while machine.state is not State.ENDED:
        seconds = max(0.0, machine.deadline - time.monotonic())
        try:
            event = events.get(timeout=None if seconds == math.inf else seconds)
        except queue.Empty:
            event = machine.time_passed
        event()


def _ending(code: int) -> str:
    """Describes how a program ended, from the exit code that a shell reports."""
    try:
        return f"was ended by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"ended with code {code}"
