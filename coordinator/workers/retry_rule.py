"""What to do with a closure whose attempt failed: a function of values, carried out by the worker's thread."""

import enum

from coordinator.errors import ClosureQuarantined
from coordinator.options import Options
from coordinator.queueing.closure import Attempt
from coordinator.runtime import Failure, FailureKind


class Decision(enum.Enum):
    """The fate of a closure after a failed attempt."""

    RETRY = "retry"
    FAIL = "fail"


class Reach(enum.Enum):
    """How far a closure's error reaches."""

    EVERYTHING = "withdraws all other closures, and join raises it"
    JOIN = "leaves the others alone, and join raises it"
    FUTURE = "is told by its future alone"


def decide(failure: Failure, failures_of_kind: int, options: Options, *, may_recover: bool = False) -> Decision:
    """Says whether a closure is run again.

    Args:
      failure: the attempt's failure.
      failures_of_kind: how many attempts of the closure failed in this way, this one included.
      options: the limits.
      may_recover: whether a parameter server that was lost is being recovered.
    """
    match failure.kind:
        case FailureKind.CANCELLED:
            # Whoever cancelled it has decided its fate, or wants it to be run later.
            return Decision.RETRY
        case FailureKind.PARAMETER_SERVER_LOST if not is_hopeless(failure, may_recover=may_recover):
            return Decision.RETRY
        case FailureKind.WORKER_LOST if failures_of_kind < options.max_attempts:
            return Decision.RETRY
        case FailureKind.TRANSIENT if failures_of_kind <= options.transient_retries:
            return Decision.RETRY
        case _:
            return Decision.FAIL


def is_hopeless(failure: Failure, *, may_recover: bool) -> bool:
    """Says whether no other attempt can mend a failure, of whatever closure.

    Args:
      failure: the attempt's failure.
      may_recover: whether a parameter server that was lost is being recovered.
    """
    return failure.kind is FailureKind.PARAMETER_SERVER_LOST and not may_recover


def reach_of(kind: FailureKind, options: Options) -> Reach:
    """Says whom the error of a closure that failed for good concerns."""
    match kind:
        case FailureKind.PARAMETER_SERVER_LOST:
            return Reach.EVERYTHING
        case FailureKind.WORKER_LOST:
            return Reach.JOIN
        case _:
            return Reach.EVERYTHING if options.stop_on_error else Reach.FUTURE


def final_error(failure: Failure, attempt: Attempt, task: str) -> BaseException:
    """The exception that a closure ends with: the failure's own, with notes that say which, where and when.

    Args:
      failure: the failure of the last attempt.
      attempt: the last attempt.
      task: the name of the worker that made it.
    """
    error, closure = failure.error, attempt.closure
    if failure.kind is FailureKind.WORKER_LOST:
        error = ClosureQuarantined(
            f"{closure} was lost with its worker too often ({closure.history()}) and is not run "
            "again. See in the workers' logs whether it kills them (memory is the usual cause), or raise "
            "Options.max_attempts if machines are preempted this often."
        )
        error.__cause__ = failure.error
    error.add_note(f"coordinator: {closure} failed on {task}, attempt {attempt.number}: {failure.kind.value}.")
    return error
