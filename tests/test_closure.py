"""The states of one closure."""

import threading
from collections.abc import Callable

import pytest

from coordinator.closure import Closure, ClosureState
from coordinator.errors import ClosureCancelledError, InvalidTransitionError
from coordinator.future import Future
from coordinator.runtime import FailureKind
from coordinator.testing.fake_runtime import FakeCancellation

MOVES: dict[str, Callable[[Closure], None]] = {
    "start": lambda closure: closure.start(3, FakeCancellation(threading.Condition())),
    "hand back": Closure.hand_back,
    "finish": lambda closure: closure.end(ClosureState.DONE),
    "fail": lambda closure: closure.end(ClosureState.FAILED),
    "cancel": lambda closure: closure.end(ClosureState.CANCELLED),
}
# How to come to each state, and the moves that may be made from there.
TABLE = {
    ClosureState.WAITING: ([], {"start", "cancel"}),
    ClosureState.RUNNING: (["start"], {"hand back", "finish", "fail", "cancel"}),
    ClosureState.DONE: (["start", "finish"], set[str]()),
    ClosureState.FAILED: (["start", "fail"], set[str]()),
    ClosureState.CANCELLED: (["start", "cancel"], set[str]()),
}


def new_closure() -> Closure:
    return Closure(print, "step", 7, Future("step", 7, on_cancel=lambda: None))


@pytest.fixture
def closure() -> Closure:
    return new_closure()


@pytest.mark.parametrize("state", ClosureState)
def test_a_closure_changes_as_its_table_allows_and_in_no_other_way(state: ClosureState) -> None:
    way, allowed = TABLE[state]
    for name, move in MOVES.items():
        closure = new_closure()
        for step in way:
            MOVES[step](closure)
        assert closure.state is state
        if name in allowed:
            move(closure)
            assert closure.state is not state
        else:
            with pytest.raises(InvalidTransitionError, match=rf"closure 7 \(step\) cannot go from {state.value} to "):
                move(closure)
            assert closure.state is state


def test_a_change_that_is_not_allowed_tells_the_history(closure: Closure) -> None:
    for kind in (FailureKind.WORKER_LOST, FailureKind.TRANSIENT):
        MOVES["start"](closure)
        closure.record_failure(kind)
        closure.hand_back()
    with pytest.raises(InvalidTransitionError, match=r"attempt 1 on worker 3: worker lost; attempt 2 on .*: transient"):
        closure.hand_back()


def test_failures_are_counted_by_kind(closure: Closure) -> None:
    assert closure.history() == "no attempt has failed"
    MOVES["start"](closure)
    kinds = [FailureKind.WORKER_LOST, FailureKind.TRANSIENT, FailureKind.WORKER_LOST]
    assert [closure.record_failure(kind) for kind in kinds] == [1, 1, 2]


def test_each_attempt_is_counted_with_its_worker_and_its_cancellation(closure: Closure) -> None:
    MOVES["start"](closure)
    assert (closure.attempts, closure.worker) == (1, 3)
    assert closure.cancellation is not None
    closure.hand_back()
    assert closure.cancellation is None
    closure.start(4, FakeCancellation(threading.Condition()))
    assert (closure.attempts, closure.worker) == (2, 4)


def test_a_closure_that_lets_go_keeps_nothing_of_its_work(closure: Closure) -> None:
    MOVES["start"](closure)
    closure.end(ClosureState.DONE)
    closure.let_go()
    assert (closure.work, closure.cancellation) == (None, None)


def test_withdrawal_says_why_and_what_to_do(closure: Closure) -> None:
    error = closure.withdrawal("the strategy was closed")
    assert isinstance(error, ClosureCancelledError)
    assert str(error).startswith("closure 7 (step) was cancelled because the strategy was closed. Please reschedule")
