"""Tests of the states of one closure, and of what follows when all scheduled closures are cancelled.

where it is                          its future       its attempts   what else
waits, for any worker or for one     is cancelled     -              it is not started any more
waits for another closure's result   is cancelled     -              the result may come later
runs, once or on two workers         is cancelled     are cancelled  counted until they end, or are abandoned
runs, and is to be tried once more   is cancelled     are cancelled  it is not started any more
is internal                          stays pending    go on          it is not counted anyway
has ended                            stays as it is   are cancelled  that of a straggler is waited for
"""

import concurrent.futures
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator.errors import InvalidTransitionError
from coordinator.future import Future
from coordinator.queueing.closure import Attempt, Closure, ClosureState, ErrorScope
from coordinator.runtime import FailureKind
from coordinator.testing.fake_runtime import FakeCancellation
from tests.deadline import LIMIT
from tests.queueing.closure_queue_bench import Stalls, new_internal, new_queue, put_new, take

MOVES: dict[str, Callable[[Closure], None]] = {
    "start": lambda closure: closure.start(3, cancellation(), 0.0) and None,
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


def test_each_attempt_is_counted_with_its_worker_and_its_cancellation(closure: Closure) -> None:
    first_cancellation, second_cancellation = (cancellation() for _ in range(2))
    first = closure.start(3, first_cancellation, 0.0)
    second = closure.start(4, second_cancellation, 0.0)
    assert closure.live == (first, second)
    assert (first.number, first.worker, first.cancellation) == (1, 3, first_cancellation)
    assert (second.number, second.worker, second.cancellation) == (2, 4, second_cancellation)
    closure.end_attempt(first)
    assert closure.live == (second,)


def cancellation() -> FakeCancellation:
    return FakeCancellation(threading.Condition())


def test_an_abandoned_attempt_is_not_waited_for_and_has_no_effect_when_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = new_queue(Stalls())
    closure = put_new(queue)
    attempt = take(queue)
    assert queue.cancel_all(timeout=0.001) == [attempt]
    queue.wait_settled(timeout=0)
    assert queue.is_settled()
    with queue.quiet(LIMIT):
        assert f"does not wait for the call of {attempt.closure} on worker {attempt.worker}" in caplog.text
    later = put_new(queue, 1)
    caplog.clear()
    queue.fail(attempt, KeyError("too late"), ErrorScope.ALL_CLOSURES)
    queue.finish([take(queue)], ["later"])
    queue.wait_settled(timeout=0)
    assert (closure.future.cancelled(), later.future.result(0)) == (True, "later")
    with pytest.raises(TimeoutError), queue.quiet(0.001):
        """The worker has not reported yet that it is idle."""
    queue.report_idle(attempt.worker)
    with queue.quiet(LIMIT):
        assert not caplog.text


def test_what_is_put_while_it_waits_is_not_cancelled_and_not_waited_for() -> None:
    queue = new_queue(Stalls())
    closure, attempt = put_new(queue), take(queue)
    internal = new_internal(queue, 5, target=1)
    queue.put(internal)
    library = take(queue, worker=1)
    with ThreadPoolExecutor() as pool:
        cancelling = pool.submit(queue.cancel_all, LIMIT)
        concurrent.futures.wait([closure.future], LIMIT)
        assert not cancelling.done()
        later = put_new(queue, 1)
        running: Attempt = take(queue)
        queue.requeue(attempt)
        assert cancelling.result(LIMIT) == []
    assert not running.cancellation.is_cancelled  # type: ignore[attr-defined]
    queue.finish([running], ["kept"])
    queue.finish([library], ["made"])
    queue.wait_settled(timeout=0)
    assert (later.future.result(0), internal.future.result(0)) == ("kept", "made")
