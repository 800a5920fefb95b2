import math
import signal
from collections.abc import Callable, Collection
from operator import methodcaller
from typing import Any

import pytest

from coordinator.launch.job_state_machine import JobStateMachine, Role, State

Event = Callable[[JobStateMachine], object]
Action = tuple[str, Any]

SERVERS_READY = methodcaller("servers_ready")
TIME_PASSED = methodcaller("time_passed")
CTRL_C = methodcaller("signal_received", signal.SIGINT)
TERMINATE = ("send", signal.SIGTERM)
KILL = ("send", signal.SIGKILL)
AGAIN = ("start", Role.CHIEF)


def chief(code: int) -> Event:
    return methodcaller("program_ended", Role.CHIEF, code)


def server_ended(name: str, *, has_served: bool = True) -> Event:
    how = "by SIGKILL", "it is not started again", f"/{name}.log"
    return methodcaller("server_ended", name, *how, has_served=has_served)


def evaluator(code: int) -> Event:
    return methodcaller("program_ended", Role.EVALUATOR, code)


class RecordedJob(JobStateMachine):
    """A run that records the actions and carries out none, at the time `now`."""

    def __init__(self, roles: Collection[Role], evaluator_timeout: float, restarts: int, server_restarts: int):
        super().__init__(self, roles, evaluator_timeout, restarts, server_restarts, clock=lambda: self.now)
        self.now = 0.0
        self.actions: list[Action] = []

    def report(self, text: str) -> None:
        self.actions.append(("report", text))

    def start(self, role: Role) -> None:
        self.actions.append(("start", role))

    def start_server(self, name: str) -> None:
        self.actions.append(("start_server", name))

    def send(self, number: signal.Signals) -> None:
        self.actions.append(("send", number))

    def suspend(self) -> None:
        self.actions.append(("suspend", None))

    def advance(self, event: Event, now: float) -> list[Action]:
        """Returns the actions that the event leads to."""
        self.now = now
        self.actions = []
        event(self)
        return self.actions


def alone(restarts: int = 0, server_restarts: int = 0) -> RecordedJob:
    return RecordedJob([Role.CHIEF], 300, restarts, server_restarts)


def with_evaluator(evaluator_timeout: float = 300, restarts: int = 0, server_restarts: int = 0) -> RecordedJob:
    return RecordedJob(Role, evaluator_timeout, restarts, server_restarts)


def advance(job: RecordedJob, *events: Event, now: float = 0.0) -> list[Action]:
    """Handles the events one after the other; returns the actions of the last one without its messages."""
    actions: list[Action] = []
    for event in events:
        actions = job.advance(event, now)
    return [action for action in actions if action[0] != "report"]


def messages(job: RecordedJob, event: Event, now: float = 0.0) -> str:
    return " ".join(text for kind, text in job.advance(event, now) if kind == "report")


def received(number: signal.Signals) -> Event:
    return methodcaller("signal_received", number)


FAILED = methodcaller("servers_failed", "it burnt")

# What follows when the servers answer, with how many restarts of the program; the actions that the last event leads
# to; and the exit code, or the state if the run goes on.
ALONE: list[tuple[list[Event], int, list[Action], int | State]] = [
    ([], 0, [AGAIN], State.RUNNING),
    ([chief(0)], 2, [], 0),
    ([chief(7)], 0, [], 7),
    ([chief(-9)], 0, [], 137),
    ([chief(-9)], 2, [AGAIN], State.RUNNING),
    ([chief(-9), chief(0)], 2, [], 0),
    ([chief(-9), chief(3), chief(4)], 2, [], 4),
    # It was interrupted.
    ([chief(130)], 2, [], 130),
    ([chief(-2)], 2, [], 130),
    ([received(signal.SIGTSTP)], 0, [("suspend", None)], State.RUNNING),
    ([CTRL_C], 2, [("send", signal.SIGINT)], State.STOPPING),
    ([CTRL_C, CTRL_C], 2, [KILL], State.STOPPING),
    ([CTRL_C, CTRL_C, chief(-9)], 2, [], 130),
    ([received(signal.SIGTERM), chief(1)], 2, [], 143),
]
WITH_EVALUATOR: list[tuple[list[Event], int, list[Action], int | State]] = [
    ([chief(0), evaluator(0)], 0, [], 0),
    ([chief(0), evaluator(3)], 0, [], 3),
    ([evaluator(3)], 1, [], State.RUNNING),
    ([evaluator(3), chief(4)], 0, [], 4),
    ([evaluator(3), chief(5)], 1, [AGAIN], State.RUNNING),
    ([evaluator(3), chief(5), chief(0)], 1, [], 3),
    ([chief(5)], 0, [TERMINATE], State.STOPPING),
    ([chief(5), evaluator(-15)], 0, [], 5),
    ([chief(-9), chief(0)], 1, [], State.AWAITING_EVALUATOR),
    ([chief(0), CTRL_C], 0, [("send", signal.SIGINT)], State.STOPPING),
    ([chief(0), CTRL_C, evaluator(-2)], 0, [], 130),
    ([received(signal.SIGTERM), chief(0)], 0, [], State.STOPPING),
    ([received(signal.SIGTERM), chief(0), evaluator(0)], 0, [], 143),
]


@pytest.mark.parametrize(("make", "cases"), [(alone, ALONE), (with_evaluator, WITH_EVALUATOR)])
def test_what_ends_the_programs_and_with_which_code(
    make: Callable[..., RecordedJob], cases: list[tuple[list[Event], int, list[Action], int | State]]
) -> None:
    for number, (events, restarts, actions, end) in enumerate(cases):
        job = make(restarts=restarts)
        assert advance(job, SERVERS_READY, *events) == actions, number
        if isinstance(end, State):
            assert job.state is end, number
        else:
            assert (job.state, job.exit_code) == (State.ENDED, end), number
    job = with_evaluator(restarts=2)
    advance(job, SERVERS_READY)
    assert "evaluator ended with code 3" in messages(job, evaluator(3))
    assert messages(job, chief(-9)) == "the chief was ended by SIGKILL: starting it again, restart 1 of 2."


def test_a_slow_evaluator_is_mentioned_after_10_s_and_terminated_at_its_timeout() -> None:
    job = with_evaluator(evaluator_timeout=60)
    assert advance(job, SERVERS_READY, chief(0), now=100) == []
    assert job.deadline == 110
    assert messages(job, TIME_PASSED, now=109) == ""
    assert "waiting for the evaluator to end, at most 50 s more" in messages(job, TIME_PASSED, now=110)
    assert job.deadline == 160
    assert advance(job, TIME_PASSED, now=160) == [TERMINATE]
    assert job.state is State.STOPPING
    assert advance(job, evaluator(-15), now=161) == []
    assert (job.state, job.exit_code) == (State.ENDED, 143)


def test_programs_that_ignore_a_signal_are_killed_after_their_time() -> None:
    job = with_evaluator(evaluator_timeout=2)
    advance(job, SERVERS_READY, chief(0))
    assert "has not ended within 2 s" in messages(job, TIME_PASSED, now=2)
    assert job.deadline == 7
    assert advance(job, TIME_PASSED, now=7) == [KILL]
    advance(job, evaluator(-9))
    assert (job.state, job.exit_code) == (State.ENDED, 137)
    job = alone()
    advance(job, SERVERS_READY, CTRL_C, now=100)
    assert advance(job, TIME_PASSED, now=114) == []
    assert advance(job, TIME_PASSED, now=115) == [KILL]
    assert job.deadline == math.inf


def test_a_signal_that_is_repeated_leaves_the_program_its_time() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        job, again = alone(), received(number)
        assert advance(job, SERVERS_READY, again) == [("send", number)]
        assert advance(job, again, again, now=1.0) == []
        assert job.deadline == 15.0
        assert advance(job, CTRL_C, now=2.0) == [KILL]
        assert advance(job, chief(-9), now=3.0) == []
        assert (job.state, job.exit_code) == (State.ENDED, 128 + number)


def test_each_server_that_ends_is_started_again_a_limited_number_of_times() -> None:
    job = alone(server_restarts=2)
    advance(job, SERVERS_READY)
    expected = "ps-0 ended unexpectedly, by SIGKILL: starting it again, restart 1 of 2. Its log: /ps-0.log"
    assert job.advance(server_ended("ps-0"), 0.0) == [("report", expected), ("start_server", "ps-0")]
    assert advance(job, server_ended("worker-0")) == [("start_server", "worker-0")]
    assert "starting it again in 1 s, restart 2 of 2" in messages(job, server_ended("ps-0"))
    assert advance(job, TIME_PASSED, now=1.0) == [("start_server", "ps-0")]
    assert job.advance(server_ended("ps-0"), 1.0) == [
        ("report", "ps-0 ended unexpectedly, by SIGKILL; it is not started again. Its log: /ps-0.log")
    ]
    assert job.state is State.RUNNING


def test_a_server_that_ends_soon_after_each_start_is_started_later_each_time() -> None:
    job = alone(server_restarts=20)
    advance(job, SERVERS_READY)
    now, delays = 0.0, []
    for _ in range(9):
        started = advance(job, server_ended("ps-0"), now=now)
        if not started:
            delays.append(job.deadline - now)
            assert advance(job, TIME_PASSED, now=job.deadline - 0.1) == []
            now = job.deadline
            started = advance(job, TIME_PASSED, now=now)
        assert started == [("start_server", "ps-0")]
        assert job.deadline == math.inf
        now += 5.0
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60]
    assert advance(job, server_ended("worker-0"), now=now) == [("start_server", "worker-0")], "another server"
    assert advance(job, server_ended("ps-0"), now=now + 61.0) == [("start_server", "ps-0")], "it has run for a minute"


def test_starts_on_a_host_that_cannot_be_reached_do_not_count_for_some_minutes() -> None:
    job = alone(server_restarts=2)
    advance(job, SERVERS_READY)
    assert "starting it again, restart 1 of 2." in messages(job, server_ended("ps-0"))
    failed = server_ended("ps-0", has_served=False)
    # As long as `ssh` takes to give up.
    now = 15.0
    while now <= 600.0:
        assert ", still restart 1 of 2." in messages(job, failed, now)
        assert advance(job, TIME_PASSED, now=job.deadline) == [("start_server", "ps-0")]
        now = job.now + 15.0
    assert ", restart 2 of 2." in messages(job, failed, now)
    assert "it is not started again" in messages(job, failed, now + 75.0)


def test_a_server_that_ends_while_others_start_is_started_again_as_later() -> None:
    job = alone(server_restarts=3)
    assert advance(job, server_ended("ps-0")) == [("start_server", "ps-0")]
    assert "starting it again in 1 s, restart 2 of 3" in messages(job, server_ended("ps-0"))
    assert job.state is State.STARTING
    assert advance(job, TIME_PASSED, now=1.0) == [("start_server", "ps-0")]
    assert advance(job, SERVERS_READY, now=2.0) == [AGAIN]
    # These restarts count later, too.
    assert "in 2 s, restart 3 of 3" in messages(job, server_ended("ps-0"), 3.0)
    assert advance(job, TIME_PASSED, now=5.0) == [("start_server", "ps-0")]
    assert "it is not started again" in messages(job, server_ended("ps-0"), 6.0)
    # One without a restart left is given up.
    job = alone(server_restarts=1)
    advance(job, server_ended("worker-0"))
    assert "it is not started again" in messages(job, server_ended("worker-0"))
    assert job.given_up == {"worker-0"}
    assert advance(job, SERVERS_READY) == [AGAIN]


def test_while_the_run_ends_no_server_is_started_again() -> None:
    for event in (CTRL_C, chief(5)):
        job = with_evaluator(server_restarts=2)
        advance(job, SERVERS_READY, server_ended("ps-0"), server_ended("ps-0"))
        assert job.deadline == 1.0
        assert advance(job, event, TIME_PASSED, server_ended("worker-0"), now=2.0) == []
        assert advance(job, chief(5), evaluator(0), server_ended("ps-0")) == []
    # Nor when it ends before the programs have started.
    for event, exit_code in ((CTRL_C, 130), (FAILED, 1)):
        job = alone(server_restarts=3)
        assert job.state is State.STARTING
        assert advance(job, server_ended("ps-0"), server_ended("ps-0"), event) == []
        assert (job.state, job.exit_code, job.deadline) == (State.ENDED, exit_code, math.inf)
        assert advance(job, TIME_PASSED, server_ended("worker-0"), SERVERS_READY, now=2.0) == []
    # They are while the evaluator runs.
    job = with_evaluator(server_restarts=1)
    assert advance(job, SERVERS_READY, chief(0), server_ended("worker-0")) == [("start_server", "worker-0")]
