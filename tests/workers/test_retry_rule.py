"""Tests of what follows a failed attempt, as a table."""

import threading

import pytest

from coordinator.errors import ClosureQuarantined
from coordinator.future import Future
from coordinator.options import Options
from coordinator.queueing.closure import Attempt, Closure, ErrorScope
from coordinator.runtime import Failure, FailureKind
from coordinator.testing.fake_runtime import FakeCancellation
from coordinator.workers.retry_rule import error_scope, final_error, may_retry

OPTIONS = Options(max_attempts=3, transient_retries=2)


RETRY, FAIL = True, False


@pytest.mark.parametrize(
    ("kind", "decisions"),
    [
        (FailureKind.WORKER_LOST, [RETRY, RETRY, FAIL]),
        (FailureKind.TRANSIENT, [RETRY, RETRY, FAIL]),
        (FailureKind.PARAMETER_SERVER_LOST, [FAIL]),
        (FailureKind.INPUT, [FAIL]),
        (FailureKind.USER, [FAIL]),
        (FailureKind.CANCELLED, [RETRY, RETRY, RETRY]),
    ],
)
def test_the_decision_after_the_first_second_and_third_failure_of_a_kind(
    kind: FailureKind, decisions: list[bool]
) -> None:
    failure = Failure(kind, KeyError())
    assert [may_retry(failure, count, OPTIONS) for count in range(1, len(decisions) + 1)] == decisions


def test_options_may_allow_one_attempt_and_a_lost_parameter_server_any_number() -> None:
    for kind, options in (
        (FailureKind.TRANSIENT, Options(transient_retries=0)),
        (FailureKind.WORKER_LOST, Options(max_attempts=1)),
    ):
        assert may_retry(Failure(kind, KeyError()), 1, options) is FAIL
    failure = Failure(FailureKind.PARAMETER_SERVER_LOST, KeyError())
    assert [may_retry(failure, count, OPTIONS, may_recover=True) for count in (1, 10, 100)] == [RETRY] * 3


def test_the_scope_of_an_error_depends_on_its_kind() -> None:
    expected = {FailureKind.PARAMETER_SERVER_LOST: ErrorScope.ALL_CLOSURES, FailureKind.WORKER_LOST: ErrorScope.JOIN}
    for stops, own in ((True, ErrorScope.ALL_CLOSURES), (False, ErrorScope.FUTURE)):
        ends = {FailureKind.END_OF_DATA: ErrorScope.END_OF_DATA} if stops else {}
        for kind in set(FailureKind) - {FailureKind.CANCELLED}:
            assert error_scope(kind, Options(stop_on_error=stops)) is (expected | ends).get(kind, own), kind


def failed_attempt(kind: FailureKind) -> Attempt:
    closure = Closure(None, "step", 7, Future("step", 7, on_cancel=lambda: False))
    attempt = closure.start(1, FakeCancellation(threading.Condition()), 0.0)
    closure.record_failure(1, kind)
    return attempt


@pytest.mark.parametrize("kind", [kind for kind in FailureKind if kind is not FailureKind.WORKER_LOST])
def test_a_closure_ends_with_the_original_exception_and_a_note_of_where_and_when(kind: FailureKind) -> None:
    error = ValueError("wrong shape")
    assert final_error(Failure(kind, error), failed_attempt(kind), "/job:worker/task:1") is error
    assert error.__notes__ == [f"coordinator: closure 7 (step) failed on /job:worker/task:1, attempt 1: {kind.value}."]


def test_a_closure_that_lost_its_last_worker_ends_quarantined_with_its_history() -> None:
    lost = ConnectionError("reset")
    failure = Failure(FailureKind.WORKER_LOST, lost)
    error = final_error(failure, failed_attempt(FailureKind.WORKER_LOST), "/job:worker/task:1")
    assert isinstance(error, ClosureQuarantined)
    assert error.original_exception is lost
    assert error.__cause__ is None, "a traceback does not show pages of gRPC's text"
    assert "attempt 1 on worker 1: worker lost" in str(error)
    assert "Options.max_attempts" in str(error)
    assert len(error.__notes__) == 1
