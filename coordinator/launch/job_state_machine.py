"""What `coordinator run` does next: each event is a call, and leads to calls of a `Job`.

    STARTING --servers ready--> RUNNING --chief ends with 0--> AWAITING_EVALUATOR
        |                        ^ |                                 |
        |                        +-+ chief fails, restarts left      |
        |                          |                                 |
        |              signal, or chief fails             signal, or time is up
        |                          |                                 |
        |                          +----------> STOPPING <-----------+
        |                                          |
        +--signal, or a server fails--> ENDED <--no program is left--+

It waits for nothing itself, so that a test gives any run as a sequence of calls. It promises to end: each state that
waits for a program to end has a deadline, after which the program is killed; and a chief that fails, or a server that
ends, is started again a limited number of times, never after the run was interrupted. A server that has served is
started again also while others still start. One that ends soon after its start is started again later each time. Starts
that came to nothing, since its host could not be reached, do not count for some minutes.
"""

import collections
import enum
import math
import signal
import time
from collections.abc import Callable, Collection
from typing import Protocol

_INTERRUPTED = 128 + signal.SIGINT
# From a terminal, after the first signal. A scheduler may repeat its own, and the program still has its time.
_IMPATIENT = (signal.SIGINT, signal.SIGQUIT)
_NOTICE_AFTER = 10.0
_SIGNAL_GRACE = 15.0
_TERMINATE_GRACE = 5.0
# A server that has run for this time after its last restart, in seconds, is started again at once.
_STABLE_AFTER = 60.0
_SHORTEST_DELAY, _LONGEST_DELAY = 1.0, 60.0
# How long after a server was lost its starts that came to nothing do not count, in seconds: a host may boot meanwhile,
# and a server that only its connection was lost to holds the port for five minutes.
_HOST_TIMEOUT = 600.0


class Role(enum.Enum):
    """The task of a copy of the user's program."""

    CHIEF = "chief"
    EVALUATOR = "evaluator"


class Job(Protocol):
    """Carries out what is decided here."""

    def report(self, text: str) -> None:
        """Reports to the user."""

    def start(self, role: Role) -> None:
        """Starts the program in a role, once more if it has ended there."""

    def start_server(self, name: str) -> None:
        """Starts a server that has ended, on its port."""

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to every program that runs."""

    def suspend(self) -> None:
        """Stops the programs and the command itself until the terminal continues it."""


class State(enum.Enum):
    """How far the run is."""

    STARTING = enum.auto()
    RUNNING = enum.auto()
    AWAITING_EVALUATOR = enum.auto()
    STOPPING = enum.auto()
    ENDED = enum.auto()


class RestartDelays:
    """How long servers wait for each restart: first not at all, then 1, 2, 4, ... seconds, at most a minute.

    Args:
      clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Of each server: when it was last to be started again, and after what delay.
        self._last: dict[str, tuple[float, float]] = {}

    def next(self, name: str) -> float:
        """Returns the delay of the next restart of a server that has ended now, in seconds."""
        now = self._clock()
        started, delay = self._last.get(name, (-math.inf, 0.0))
        is_stable = now - started > _STABLE_AFTER
        delay = 0.0 if is_stable else min(max(_SHORTEST_DELAY, 2 * delay), _LONGEST_DELAY)
        self._last[name] = now + delay, delay
        return delay


class JobStateMachine:
    """The state of one run.

    Args:
      job: carries out what is to be done.
      roles: the roles that the program has in it.
      evaluator_timeout: how long the evaluator may run after the chief has ended with code 0, in seconds.
      restarts: how often a chief that fails is started again. The evaluator continues meanwhile.
      server_restarts: how often each server is started again.
      clock: returns the time in seconds.

    Attributes:
      state: how far the run is.
      exit_code: the exit code of the command; it is final when the state is `ENDED`.
      given_up: the names of servers that have ended and are not started again. Other threads may read it.
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
        self._deadline: float | None = None
        self._job = job
        self._roles = roles
        self._running: set[Role] = set()
        self._restarts = restarts
        self._restarted = 0
        self._server_restarts = server_restarts
        self._servers_restarted: collections.Counter[str] = collections.Counter()
        # When each server was lost that had served.
        self._lost: dict[str, float] = {}
        self._delays = RestartDelays(clock)
        # When servers are to be started again.
        self._due: dict[str, float] = {}
        self._evaluator_timeout = evaluator_timeout
        self._evaluator_code = 0
        self._evaluator_deadline = 0.0
        self._clock = clock

    @property
    def deadline(self) -> float | None:
        """The time at which `time_passed` is due, or None."""
        times = [*self._due.values(), *([] if self._deadline is None else [self._deadline])]
        return min(times, default=None)

    def servers_ready(self) -> None:
        """Starts the programs: every server answers that was not given up."""
        if self.state is State.STARTING:
            self.state = State.RUNNING
            self._running = set(self._roles)
            for role in self._roles:
                self._job.start(role)

    def servers_failed(self, reason: str) -> None:
        """Ends the run: a server did not come up; `reason` says which and why."""
        if self.state is State.STARTING:
            self._end(1)
            self._job.report(reason)

    def server_ended(self, name: str, ending: str, consequence: str, log: str, *, has_served: bool = True) -> None:
        """Starts a server again that ended although nothing here ended it, or reports what follows.

        Args:
          name: of the server.
          ending: how it ended, such as `by SIGKILL`.
          consequence: what follows if it is not started again.
          log: the path of its log.
          has_served: False if its last start came to nothing, perhaps because its host cannot be reached.
        """
        if has_served:
            self._lost[name] = self._clock()
        is_counted = has_served or self._clock() - self._lost.get(name, -math.inf) > _HOST_TIMEOUT
        what = f"{name} ended unexpectedly, {ending}"
        is_needed = self.state not in (State.STOPPING, State.ENDED)
        if is_needed and (not is_counted or self._servers_restarted[name] < self._server_restarts):
            self._servers_restarted[name] += is_counted
            still = "" if is_counted else "still "
            count = f"{still}restart {self._servers_restarted[name]} of {self._server_restarts}"
            delay = self._delays.next(name)
            when = f" in {delay:g} s" if delay else ""
            self._job.report(f"{what}: starting it again{when}, {count}. Its log: {log}")
            if delay:
                self._due[name] = self._clock() + delay
            else:
                self._job.start_server(name)
        else:
            self.given_up.add(name)
            self._job.report(f"{what}; {consequence}. Its log: {log}")

    def signal_received(self, number: signal.Signals) -> None:
        """Passes on a signal that the command received, or ends the run."""
        if number is signal.SIGTSTP:
            self._job.suspend()
        elif self.state is State.STARTING:
            self._end(128 + number)
        elif self.state is not State.STOPPING:
            self._stop(128 + number, _SIGNAL_GRACE)
            grace = f"the program has {_SIGNAL_GRACE:.0f} s to exit"
            self._job.report(f"{number.name}: {grace}; Ctrl-C kills it now.")
            self._job.send(number)
        elif number in _IMPATIENT:
            self._job.report("killing the program.")
            self._job.send(signal.SIGKILL)

    def program_ended(self, role: Role, code: int) -> None:
        """Decides what follows the end of a program; a negative code is minus the signal that ended it."""
        # As a shell reports the code of a program that a signal ended.
        code = 128 - code if code < 0 else code
        self._running.discard(role)
        if self.state is State.STOPPING:
            if role is Role.EVALUATOR and self.exit_code == 0:
                self.exit_code = code
            if not self._running:
                self._end(self.exit_code)
        elif role is Role.EVALUATOR:
            self._evaluator_ended(code)
        else:
            self._chief_ended(code)

    def time_passed(self) -> None:
        """Decides what follows the deadline, if it has passed."""
        now = self._clock()
        for name in [name for name, due in self._due.items() if due <= now]:
            del self._due[name]
            self._job.start_server(name)
        if self._deadline is None or now < self._deadline:
            return
        if self.state is State.STOPPING:
            self._deadline = None
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

    def _evaluator_ended(self, code: int) -> None:
        self._evaluator_code = code
        if self.state is State.AWAITING_EVALUATOR:
            self._end(code)
        elif code != 0:
            self._job.report(f"the evaluator ended with code {code}; training continues without it.")

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
        self.state = State.STOPPING
        self._due.clear()
        self.exit_code = exit_code
        self._deadline = self._clock() + grace

    def _end(self, exit_code: int) -> None:
        self.state = State.ENDED
        self._due.clear()
        self.exit_code = exit_code
        self._deadline = None


def _ending(code: int) -> str:
    """Returns how a program ended whose exit code a shell reports as this."""
    try:
        return f"was ended by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"ended with code {code}"
