"""Tests of the states of one closure."""

import threading
from collections.abc import Callable

import pytest

from coordinator.errors import InvalidTransitionError
from coordinator.future import Future
from coordinator.queueing.closure import Closure, ClosureState
from coordinator.runtime import FailureKind
from coordinator.testing.fake_runtime import FakeCancellation

MOVES: dict[str, Callable[[Closure], None]] = {
    "start": lambda closure: closure.start(3, FakeCancellation(threading.Condition())) and None,
    "unblock": lambda closure: closure.unblock(),
    "wait": Closure.requeue,
    "finish": lambda closure: closure.end(ClosureState.DONE),
    "fail": lambda closure: closure.end(ClosureState.FAILED),
    "cancel": lambda closure: closure.end(ClosureState.CANCELLED),
}
# How to reach each state, and the transitions that are allowed from there.
TABLE = {
    ClosureState.BLOCKED: (None, {"unblock", "fail", "cancel"}),
    ClosureState.WAITING: ([], {"start", "fail", "cancel"}),
    ClosureState.RUNNING: (["start"], {"start", "wait", "finish", "fail", "cancel"}),
    ClosureState.DONE: (["start", "finish"], set[str]()),
    ClosureState.FAILED: (["start", "fail"], set[str]()),
    ClosureState.CANCELLED: (["start", "cancel"], set[str]()),
}


def new_closure(blockers: int = 0) -> Closure:
    return Closure(print, "step", 7, Future("step", 7, on_cancel=lambda: False), blockers=blockers)


@pytest.fixture
def closure() -> Closure:
    return new_closure()


@pytest.mark.parametrize("state", ClosureState)
def test_a_closure_makes_only_the_transitions_of_its_table(state: ClosureState) -> None:
    path, allowed = TABLE[state]
    for name, move in MOVES.items():
        closure = new_closure(blockers=1 if path is None else 0)
        for step in path or []:
            MOVES[step](closure)
        assert closure.state is state
        if name in allowed:
            move(closure)
            assert closure.state is not state or name == "start"
        else:
            with pytest.raises(InvalidTransitionError, match=rf"closure 7 \(step\) cannot go from {state.value} by "):
                move(closure)
            assert closure.state is state


def test_a_forbidden_transition_raises_with_the_history(closure: Closure) -> None:
    counts = []
    for kind in (FailureKind.WORKER_LOST, FailureKind.TRANSIENT, FailureKind.WORKER_LOST):
        MOVES["start"](closure)
        counts.append(closure.record_failure(3, kind))
        closure.requeue()
    # By kind.
    assert counts == [1, 1, 2]
    with pytest.raises(InvalidTransitionError, match=r"attempt 1 on worker 3: worker lost; attempt 2 on .*: transient"):
        closure.requeue()


def test_a_closure_is_blocked_until_its_last_argument_is_available() -> None:
    closure = new_closure(blockers=2)
    closure.unblock()
    assert closure.state is ClosureState.BLOCKED
    closure.unblock()
    assert closure.state is ClosureState.WAITING


def test_each_attempt_is_counted_with_its_worker_and_its_cancellation(closure: Closure) -> None:
    first_cancellation, second_cancellation = (FakeCancellation(threading.Condition()) for _ in range(2))
    first = closure.start(3, first_cancellation)
    second = closure.start(4, second_cancellation)
    assert closure.live == (first, second)
    assert (first.number, first.worker, first.cancellation) == (1, 3, first_cancellation)
    assert (second.number, second.worker, second.cancellation) == (2, 4, second_cancellation)
    closure.end_attempt(first)
    assert closure.live == (second,)
