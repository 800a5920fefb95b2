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


def test_the_programs_start_when_every_server_answers() -> None:
    job = alone()
    assert job.state is State.STARTING
    assert advance(job, SERVERS_READY) == [AGAIN]
    assert job.state is State.RUNNING
    assert job.deadline == math.inf


def test_a_server_that_does_not_come_up_ends_the_run() -> None:
    job = alone()
    assert messages(job, methodcaller("servers_failed", "it burnt")) == "it burnt"
    assert (job.state, job.exit_code) == (State.ENDED, 1)


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (7, 7), (-9, 137), (-11, 139)])
def test_the_exit_code_is_that_of_the_chief(code: int, exit_code: int) -> None:
    job = alone()
    assert advance(job, SERVERS_READY, chief(code)) == []
    assert (job.state, job.exit_code) == (State.ENDED, exit_code)


@pytest.mark.parametrize("first", ["chief", "evaluator"])
@pytest.mark.parametrize(("chief_code", "evaluator_code", "exit_code"), [(0, 0, 0), (0, 3, 3), (0, -6, 134)])
def test_the_exit_code_is_that_of_the_evaluator_if_the_chief_ends_with_0(
    first: str, chief_code: int, evaluator_code: int, exit_code: int
) -> None:
    job = with_evaluator()
    ends = [chief(chief_code), evaluator(evaluator_code)]
    assert advance(job, SERVERS_READY, *(ends if first == "chief" else reversed(ends))) == []
    assert (job.state, job.exit_code) == (State.ENDED, exit_code)


def test_an_evaluator_that_fails_is_mentioned_and_training_continues() -> None:
    job = with_evaluator()
    advance(job, SERVERS_READY)
    assert "evaluator ended with code 3" in messages(job, evaluator(3))
    assert job.state is State.RUNNING
    advance(job, chief(4))
    assert (job.state, job.exit_code) == (State.ENDED, 4)


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


def test_an_evaluator_timeout_below_the_notice_is_kept() -> None:
    job = with_evaluator(evaluator_timeout=2)
    advance(job, SERVERS_READY, chief(0), now=0)
    assert job.deadline == 2
    assert "has not ended within 2 s" in messages(job, TIME_PASSED, now=2)


def test_an_evaluator_that_ignores_the_signal_is_killed() -> None:
    job = with_evaluator(evaluator_timeout=2)
    advance(job, SERVERS_READY, chief(0))
    advance(job, TIME_PASSED, now=2)
    assert job.deadline == 7
    assert advance(job, TIME_PASSED, now=7) == [KILL]
    assert advance(job, evaluator(-9)) == []
    assert (job.state, job.exit_code) == (State.ENDED, 137)


def test_a_chief_that_fails_ends_the_evaluator_at_once_and_its_code_stays() -> None:
    job = with_evaluator()
    assert advance(job, SERVERS_READY, chief(5)) == [TERMINATE]
    assert advance(job, evaluator(-15)) == []
    assert (job.state, job.exit_code) == (State.ENDED, 5)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_goes_to_the_programs_which_have_15_s(number: signal.Signals, exit_code: int) -> None:
    job = with_evaluator()
    assert advance(job, SERVERS_READY, methodcaller("signal_received", number), now=100) == [("send", number)]
    assert job.deadline == 115
    assert advance(job, chief(0), now=101) == []
    assert job.state is State.STOPPING
    assert advance(job, evaluator(0), now=102) == []
    assert (job.state, job.exit_code) == (State.ENDED, exit_code)


def test_programs_that_ignore_the_signal_for_15_s_are_killed() -> None:
    job = alone()
    advance(job, SERVERS_READY, CTRL_C, now=100)
    assert advance(job, TIME_PASSED, now=114) == []
    assert advance(job, TIME_PASSED, now=115) == [KILL]
    assert job.deadline == math.inf
    assert advance(job, chief(-9)) == []
    assert job.exit_code == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_is_repeated_leaves_the_program_its_time(number: signal.Signals) -> None:
    job = alone()
    again = methodcaller("signal_received", number)
    assert advance(job, SERVERS_READY, again) == [("send", number)]
    assert advance(job, again, again, now=1.0) == []
    assert job.deadline == 15.0
    assert advance(job, CTRL_C, now=2.0) == [KILL]
    assert advance(job, chief(-9), now=3.0) == []
    assert (job.state, job.exit_code) == (State.ENDED, 128 + number)


def test_a_second_ctrl_c_kills_at_once() -> None:
    job = alone()
    assert advance(job, SERVERS_READY, CTRL_C, CTRL_C) == [KILL]
    advance(job, chief(-9))
    assert (job.state, job.exit_code) == (State.ENDED, 130)


def test_a_signal_ends_the_wait_for_the_evaluator() -> None:
    job = with_evaluator()
    assert advance(job, SERVERS_READY, chief(0), CTRL_C) == [("send", signal.SIGINT)]
    advance(job, evaluator(-2))
    assert (job.state, job.exit_code) == (State.ENDED, 130)


def test_a_signal_before_the_programs_start_ends_the_run() -> None:
    job = alone()
    assert advance(job, CTRL_C) == []
    assert (job.state, job.exit_code) == (State.ENDED, 130)
    assert advance(job, SERVERS_READY) == []


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


def test_a_host_that_is_back_has_the_time_again_when_it_is_lost_the_next_time() -> None:
    job = alone(server_restarts=2)
    advance(job, SERVERS_READY, server_ended("ps-0"))
    assert "still restart 1 of 2." in messages(job, server_ended("ps-0", has_served=False), 590.0)
    assert "restart 2 of 2." in messages(job, server_ended("ps-0"), 3000.0)
    assert "still restart 2 of 2." in messages(job, server_ended("ps-0", has_served=False), 3300.0)
    assert advance(job, server_ended("ps-0"), now=4000.0) == []


def test_a_server_that_waits_for_its_restart_is_forgotten_when_the_run_ends() -> None:
    job = alone(server_restarts=2)
    advance(job, SERVERS_READY, server_ended("ps-0"), server_ended("ps-0"))
    assert job.deadline == 1.0
    advance(job, CTRL_C)
    assert job.deadline == 15.0
    assert advance(job, TIME_PASSED, now=2.0) == []


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


def test_a_restart_that_is_pending_when_all_others_are_ready_is_made() -> None:
    job = alone(server_restarts=3)
    advance(job, server_ended("ps-0"), server_ended("ps-0"))
    assert advance(job, SERVERS_READY) == [AGAIN]
    assert job.deadline == 1.0
    assert advance(job, TIME_PASSED, now=1.0) == [("start_server", "ps-0")]


def test_a_server_without_a_restart_left_is_given_up_while_others_start() -> None:
    job = alone(server_restarts=1)
    advance(job, server_ended("worker-0"))
    assert job.given_up == set()
    assert "it is not started again" in messages(job, server_ended("worker-0"))
    assert job.given_up == {"worker-0"}
    assert advance(job, SERVERS_READY) == [AGAIN]


@pytest.mark.parametrize("event", [CTRL_C, methodcaller("servers_failed", "it burnt")])
def test_a_run_that_ends_while_servers_start_starts_none_again(event: Event) -> None:
    job = alone(server_restarts=3)
    advance(job, server_ended("ps-0"), server_ended("ps-0"), event)
    assert job.state is State.ENDED
    assert job.deadline == math.inf
    assert advance(job, TIME_PASSED, now=2.0) == []
    assert advance(job, server_ended("worker-0"), now=2.0) == []


@pytest.mark.parametrize("event", [CTRL_C, chief(5)])
def test_while_the_run_ends_no_server_is_started_again(event: Event) -> None:
    job = with_evaluator(server_restarts=2)
    assert advance(job, SERVERS_READY, event, server_ended("ps-0")) == []
    assert advance(job, chief(5), evaluator(0), server_ended("ps-0")) == []


def test_servers_are_started_again_while_the_evaluator_runs() -> None:
    job = with_evaluator(server_restarts=1)
    assert advance(job, SERVERS_READY, chief(0), server_ended("worker-0")) == [("start_server", "worker-0")]


def test_a_suspended_terminal_suspends_the_programs() -> None:
    job = alone()
    assert advance(job, SERVERS_READY, methodcaller("signal_received", signal.SIGTSTP)) == [("suspend", None)]
    assert job.state is State.RUNNING


@pytest.mark.parametrize(
    ("code", "outcome"), [(-9, "was ended by SIGKILL"), (3, "ended with code 3"), (255, "ended with code 255")]
)
def test_a_chief_that_fails_is_started_again_and_reported(code: int, outcome: str) -> None:
    job = alone(restarts=2)
    advance(job, SERVERS_READY)
    expected = f"the chief {outcome}: starting it again, restart 1 of 2."
    assert job.advance(chief(code), 0.0) == [("report", expected), AGAIN]
    assert job.state is State.RUNNING
    assert job.deadline == math.inf


def test_a_chief_that_keeps_failing_ends_the_run_with_its_last_code() -> None:
    job = alone(restarts=2)
    assert advance(job, SERVERS_READY, chief(-9)) == [AGAIN]
    assert advance(job, chief(3)) == [AGAIN]
    assert advance(job, chief(4)) == []
    assert (job.state, job.exit_code) == (State.ENDED, 4)


def test_a_chief_that_succeeds_after_a_restart_ends_the_run_successfully() -> None:
    job = alone(restarts=2)
    assert advance(job, SERVERS_READY, chief(-9), chief(0)) == []
    assert (job.state, job.exit_code) == (State.ENDED, 0)


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (130, 130), (-2, 130)])
def test_a_chief_that_succeeds_or_is_interrupted_is_not_started_again(code: int, exit_code: int) -> None:
    job = alone(restarts=2)
    assert advance(job, SERVERS_READY, chief(code)) == []
    assert (job.state, job.exit_code) == (State.ENDED, exit_code)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_after_a_signal_to_the_command_nothing_is_started_again(number: signal.Signals) -> None:
    job = alone(restarts=2)
    assert advance(job, SERVERS_READY, methodcaller("signal_received", number), chief(1)) == []
    assert (job.state, job.exit_code) == (State.ENDED, 128 + number)


def test_the_evaluator_runs_while_the_chief_is_started_again() -> None:
    job = with_evaluator(restarts=1)
    assert advance(job, SERVERS_READY, chief(-9)) == [AGAIN]
    assert advance(job, chief(0)) == []
    assert job.state is State.AWAITING_EVALUATOR
    assert advance(job, evaluator(0)) == []
    assert (job.state, job.exit_code) == (State.ENDED, 0)


def test_an_evaluator_that_fails_is_not_started_again() -> None:
    job = with_evaluator(restarts=1)
    assert advance(job, SERVERS_READY, evaluator(3)) == []
    assert advance(job, chief(5)) == [AGAIN]
    assert advance(job, chief(0)) == []
    assert (job.state, job.exit_code) == (State.ENDED, 3)


def test_an_evaluator_is_ended_when_no_restart_is_left() -> None:
    job = with_evaluator(restarts=1)
    assert advance(job, SERVERS_READY, chief(5), chief(6)) == [TERMINATE]
    assert advance(job, evaluator(-15)) == []
    assert (job.state, job.exit_code) == (State.ENDED, 6)
