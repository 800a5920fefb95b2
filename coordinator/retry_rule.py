"""What to do with a closure whose attempt failed: a function of values, carried out by the worker's thread."""

import enum

from coordinator.closure import Closure
from coordinator.errors import ClosureQuarantinedError
from coordinator.options import Options
from coordinator.runtime import Failure, FailureKind


class Decision(enum.Enum):
    """The fate of a closure after a failed attempt."""

    RETRY = "retry"
    FAIL = "fail"
    CANCEL = "cancel"


def decide(failure: Failure, failures_of_kind: int, options: Options) -> Decision:
    """Says whether a closure is run again.

    Args:
      failure: the attempt's failure.
      failures_of_kind: how many attempts of the closure failed in this way, this one included.
      options: the limits.
    """
    match failure.kind:
        case FailureKind.CANCELLED:
            return Decision.CANCEL
        case FailureKind.WORKER_LOST if failures_of_kind < options.max_worker_losses:
            return Decision.RETRY
        case FailureKind.TRANSIENT if failures_of_kind <= options.transient_retries:
            return Decision.RETRY
        case _:
            return Decision.FAIL


def final_error(failure: Failure, closure: Closure, task: str) -> BaseException:
    """The exception that a closure ends with: the failure's own, with notes that say which, where and when.

    Args:
      failure: the failure of the last attempt.
      closure: the closure that failed.
      task: the name of the worker that ran the last attempt.
    """
    error = failure.error
    if failure.kind is FailureKind.WORKER_LOST:
        error = ClosureQuarantinedError(
            f"{closure} was lost with its worker too often ({closure.history()}) and is not run "
            "again. See in the workers' logs whether it kills them (memory is the usual cause), or raise "
            "Options.max_worker_losses if machines are preempted this often."
        )
        error.__cause__ = failure.error
    error.add_note(f"coordinator: {closure} failed on {task}, attempt {closure.attempts}: {failure.kind.value}.")
    return error
