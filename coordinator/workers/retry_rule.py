"""What is done about a closure whose attempt failed: pure decisions, and the error that users see."""

from collections.abc import Callable

from coordinator.errors import ClosureQuarantined
from coordinator.options import Options
from coordinator.queueing.closure import Attempt, ErrorScope
from coordinator.runtime import Failure, FailureKind

# Kinds of failures whose errors are TensorFlow's about its servers.
_OF_SERVERS = (
    FailureKind.WORKER_LOST,
    FailureKind.PARAMETER_SERVER_LOST,
    FailureKind.LINK_LOST,
    FailureKind.TRANSIENT,
)


def may_retry(
    failure: Failure,
    failures_of_kind: int,
    options: Options,
    *,
    may_recover: bool = False,
    may_go_elsewhere: Callable[[], bool] = lambda: False,
) -> bool:
    """Decides whether a closure is run again.

    Args:
      failure: of the latest attempt.
      failures_of_kind: how many attempts of the closure failed in this way, the latest included.
      options: the limits.
      may_recover: whether lost parameter servers are being recovered.
      may_go_elsewhere: asked when a closure was lost with its worker as often as it may be: returns whether that was
        always the same worker, and another one can run it. Then not the closure but the worker is at fault.
    """
    match failure.kind:
        case FailureKind.CANCELLED | FailureKind.LINK_LOST:
            # Of a cancelled one: if the user did it, its outcome is decided already; if the library did, it is to run
            # later. A broken link is no fault of the closure, and nothing runs there before it is whole.
            return True
        case FailureKind.PARAMETER_SERVER_LOST:
            return may_recover
        case FailureKind.WORKER_LOST:
            return failures_of_kind < options.max_attempts or (options.max_attempts > 1 and may_go_elsewhere())
        case FailureKind.TRANSIENT:
            return failures_of_kind <= options.transient_retries
        case _:
            return False


def error_scope(kind: FailureKind, options: Options) -> ErrorScope:
    """Returns what the error of a closure that is not retried affects."""
    match kind:
        case FailureKind.PARAMETER_SERVER_LOST:
            return ErrorScope.ALL_CLOSURES
        case FailureKind.WORKER_LOST:
            return ErrorScope.JOIN
        case FailureKind.END_OF_DATA:
            return ErrorScope.END_OF_DATA if options.stop_on_error else ErrorScope.FUTURE
        case _:
            return ErrorScope.ALL_CLOSURES if options.stop_on_error else ErrorScope.FUTURE


def final_error(failure: Failure, attempt: Attempt, task: str) -> BaseException:
    """Returns the exception that a closure ends with: of its last attempt, with notes that say which, where and when.

    The task is the name of the worker that made the attempt.
    """
    error, closure = failure.error, attempt.closure
    if failure.kind is FailureKind.WORKER_LOST:
        alone = f" No worker but {task} could run it." if len(closure.lost_on) == 1 else ""
        error = ClosureQuarantined(
            f"{closure} was lost with its worker too often ({closure.history()}) and is not run again.{alone} See in "
            "the workers' logs whether it kills them (memory is the usual cause), or raise Options.max_attempts if "
            "machines are preempted this often."
        )
        error.original_exception = failure.error
    error.add_note(f"coordinator: {closure} failed on {task}, attempt {attempt.number}: {failure.kind.value}.")
    return error


def summary(failure: Failure) -> str:
    """Returns why an attempt failed: the first line of its error, or the class of an error about servers."""
    name = type(failure.error).__name__
    if failure.kind in _OF_SERVERS:
        return f"{failure.kind.value} ({name})"
    return f"{name}: {str(failure.error).partition(chr(10))[0]}"
