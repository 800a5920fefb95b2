import signal

import pytest

from coordinator.launch.job_state_machine import (
    Action,
    Event,
    JobStateMachine,
    ProgramEnded,
    Role,
    Say,
    SendSignal,
    ServerEnded,
    ServersFailed,
    ServersReady,
    SignalReceived,
    StartProgram,
    State,
    Suspend,
    TimePassed,
)

CTRL_C = SignalReceived(signal.SIGINT)
TERMINATE = SendSignal(signal.SIGTERM)
KILL = SendSignal(signal.SIGKILL)
AGAIN = StartProgram(Role.CHIEF)


def chief(code: int) -> ProgramEnded:
    return ProgramEnded(Role.CHIEF, code)


def evaluator(code: int) -> ProgramEnded:
    return ProgramEnded(Role.EVALUATOR, code)


def alone(restarts: int = 0) -> JobStateMachine:
    return JobStateMachine(frozenset({Role.CHIEF}), evaluator_timeout=300, restarts=restarts)


def with_evaluator(evaluator_timeout: float = 300, restarts: int = 0) -> JobStateMachine:
    return JobStateMachine(frozenset(Role), evaluator_timeout, restarts)


def advance(course: JobStateMachine, *events: Event, now: float = 0.0) -> list[Action]:
    """Takes the events one after the other; returns what the last one led to, without what was said."""
    actions: list[Action] = []
    for event in events:
        actions = course.advance(event, now)
    return [action for action in actions if not isinstance(action, Say)]


def words(course: JobStateMachine, event: Event, now: float = 0.0) -> str:
    return " ".join(action.text for action in course.advance(event, now) if isinstance(action, Say))


def test_the_programs_start_when_every_server_answers() -> None:
    course = alone()
    assert course.state is State.STARTING
    assert advance(course, ServersReady()) == [AGAIN]
    assert course.state is State.RUNNING
    assert course.deadline is None


def test_a_server_that_does_not_come_up_ends_the_run() -> None:
    course = alone()
    assert words(course, ServersFailed("it burnt")) == "it burnt"
    assert (course.state, course.exit_code) == (State.ENDED, 1)


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (7, 7), (-9, 137), (-11, 139)])
def test_the_exit_code_is_that_of_the_chief(code: int, exit_code: int) -> None:
    course = alone()
    assert advance(course, ServersReady(), chief(code)) == []
    assert (course.state, course.exit_code) == (State.ENDED, exit_code)


@pytest.mark.parametrize("first", ["chief", "evaluator"])
@pytest.mark.parametrize(("chief_code", "evaluator_code", "exit_code"), [(0, 0, 0), (0, 3, 3), (0, -6, 134)])
def test_the_exit_code_is_that_of_the_evaluator_if_the_chief_ends_with_0(
    first: str, chief_code: int, evaluator_code: int, exit_code: int
) -> None:
    course = with_evaluator()
    ends = [chief(chief_code), evaluator(evaluator_code)]
    assert advance(course, ServersReady(), *(ends if first == "chief" else reversed(ends))) == []
    assert (course.state, course.exit_code) == (State.ENDED, exit_code)


def test_an_evaluator_that_fails_is_mentioned_and_training_continues() -> None:
    course = with_evaluator()
    advance(course, ServersReady())
    assert "evaluator ended with code 3" in words(course, evaluator(3))
    assert course.state is State.RUNNING
    advance(course, chief(4))
    assert (course.state, course.exit_code) == (State.ENDED, 4)


def test_a_slow_evaluator_is_mentioned_after_10_s_and_terminated_at_its_timeout() -> None:
    course = with_evaluator(evaluator_timeout=60)
    assert advance(course, ServersReady(), chief(0), now=100) == []
    assert course.deadline == 110
    assert words(course, TimePassed(), now=109) == ""
    assert "waiting for the evaluator to end, at most 50 s more" in words(course, TimePassed(), now=110)
    assert course.deadline == 160
    assert advance(course, TimePassed(), now=160) == [TERMINATE]
    assert course.state is State.STOPPING
    assert advance(course, evaluator(-15), now=161) == []
    assert (course.state, course.exit_code) == (State.ENDED, 143)


def test_an_evaluator_timeout_below_the_notice_is_kept() -> None:
    course = with_evaluator(evaluator_timeout=2)
    advance(course, ServersReady(), chief(0), now=0)
    assert course.deadline == 2
    assert "has not ended within 2 s" in words(course, TimePassed(), now=2)


def test_an_evaluator_that_ignores_the_signal_is_killed() -> None:
    course = with_evaluator(evaluator_timeout=2)
    advance(course, ServersReady(), chief(0))
    advance(course, TimePassed(), now=2)
    assert course.deadline == 7
    assert advance(course, TimePassed(), now=7) == [KILL]
    assert advance(course, evaluator(-9)) == []
    assert (course.state, course.exit_code) == (State.ENDED, 137)


def test_a_chief_that_fails_ends_the_evaluator_at_once_and_its_code_stays() -> None:
    course = with_evaluator()
    assert advance(course, ServersReady(), chief(5)) == [TERMINATE]
    assert advance(course, evaluator(-15)) == []
    assert (course.state, course.exit_code) == (State.ENDED, 5)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_goes_to_the_programs_which_have_15_s(number: signal.Signals, exit_code: int) -> None:
    course = with_evaluator()
    assert advance(course, ServersReady(), SignalReceived(number), now=100) == [SendSignal(number)]
    assert course.deadline == 115
    assert advance(course, chief(0), now=101) == []
    assert course.state is State.STOPPING
    assert advance(course, evaluator(0), now=102) == []
    assert (course.state, course.exit_code) == (State.ENDED, exit_code)


def test_programs_that_ignore_the_signal_for_15_s_are_killed() -> None:
    course = alone()
    advance(course, ServersReady(), CTRL_C, now=100)
    assert advance(course, TimePassed(), now=114) == []
    assert advance(course, TimePassed(), now=115) == [KILL]
    assert course.deadline is None
    assert advance(course, chief(-9)) == []
    assert course.exit_code == 130


def test_a_second_signal_kills_at_once() -> None:
    course = alone()
    assert advance(course, ServersReady(), CTRL_C, CTRL_C) == [KILL]
    advance(course, chief(-9))
    assert (course.state, course.exit_code) == (State.ENDED, 130)


def test_a_signal_ends_the_wait_for_the_evaluator() -> None:
    course = with_evaluator()
    assert advance(course, ServersReady(), chief(0), CTRL_C) == [SendSignal(signal.SIGINT)]
    advance(course, evaluator(-2))
    assert (course.state, course.exit_code) == (State.ENDED, 130)


def test_a_signal_before_the_programs_start_ends_the_run() -> None:
    course = alone()
    assert advance(course, CTRL_C) == []
    assert (course.state, course.exit_code) == (State.ENDED, 130)
    assert advance(course, ServersReady()) == []


def test_a_server_that_ends_is_mentioned_and_the_run_continues() -> None:
    course = alone()
    advance(course, ServersReady())
    said = words(course, ServerEnded("/job:worker/task:1", "/logs/worker-1.log"))
    assert "/job:worker/task:1" in said
    assert "/logs/worker-1.log" in said
    assert course.state is State.RUNNING


def test_a_suspended_terminal_suspends_the_programs() -> None:
    course = alone()
    assert advance(course, ServersReady(), SignalReceived(signal.SIGTSTP)) == [Suspend()]
    assert course.state is State.RUNNING


@pytest.mark.parametrize(
    ("code", "words_for_it"), [(-9, "was ended by SIGKILL"), (3, "ended with code 3"), (255, "ended with code 255")]
)
def test_a_chief_that_fails_is_started_again_and_reported(code: int, words_for_it: str) -> None:
    course = alone(restarts=2)
    advance(course, ServersReady())
    expected = f"the chief {words_for_it}: starting it again, restart 1 of 2."
    assert course.advance(chief(code), 0.0) == [Say(expected), AGAIN]
    assert course.state is State.RUNNING
    assert course.deadline is None


def test_a_chief_that_keeps_failing_ends_the_run_with_its_last_code() -> None:
    course = alone(restarts=2)
    assert advance(course, ServersReady(), chief(-9)) == [AGAIN]
    assert advance(course, chief(3)) == [AGAIN]
    assert advance(course, chief(4)) == []
    assert (course.state, course.exit_code) == (State.ENDED, 4)


def test_a_chief_that_succeeds_after_a_restart_ends_the_run_successfully() -> None:
    course = alone(restarts=2)
    assert advance(course, ServersReady(), chief(-9), chief(0)) == []
    assert (course.state, course.exit_code) == (State.ENDED, 0)


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (130, 130), (-2, 130)])
def test_a_chief_that_succeeds_or_is_interrupted_is_not_started_again(code: int, exit_code: int) -> None:
    course = alone(restarts=2)
    assert advance(course, ServersReady(), chief(code)) == []
    assert (course.state, course.exit_code) == (State.ENDED, exit_code)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_after_a_signal_to_the_command_nothing_is_started_again(number: signal.Signals) -> None:
    course = alone(restarts=2)
    assert advance(course, ServersReady(), SignalReceived(number), chief(1)) == []
    assert (course.state, course.exit_code) == (State.ENDED, 128 + number)


def test_the_evaluator_runs_while_the_chief_is_started_again() -> None:
    course = with_evaluator(restarts=1)
    assert advance(course, ServersReady(), chief(-9)) == [AGAIN]
    assert advance(course, chief(0)) == []
    assert course.state is State.AWAITING_EVALUATOR
    assert advance(course, evaluator(0)) == []
    assert (course.state, course.exit_code) == (State.ENDED, 0)


def test_an_evaluator_that_fails_is_not_started_again() -> None:
    course = with_evaluator(restarts=1)
    assert advance(course, ServersReady(), evaluator(3)) == []
    assert advance(course, chief(5)) == [AGAIN]
    assert advance(course, chief(0)) == []
    assert (course.state, course.exit_code) == (State.ENDED, 3)


def test_an_evaluator_is_ended_when_no_restart_is_left() -> None:
    course = with_evaluator(restarts=1)
    assert advance(course, ServersReady(), chief(5), chief(6)) == [TERMINATE]
    assert advance(course, evaluator(-15)) == []
    assert (course.state, course.exit_code) == (State.ENDED, 6)
