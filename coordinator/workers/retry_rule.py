"""Pure functions: is a closure run again when its worker died or its call failed, or else, which error do users see?"""

from collections.abc import Callable

from coordinator.errors import ClosureQuarantined, add_note
from coordinator.options import Options
from coordinator.queueing.closure import Attempt, ErrorScope
from coordinator.runtime import Failure, FailureKind

# The kinds of failures whose errors come from TensorFlow and describe its servers.
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
    """Decides whether a closure runs again.

    `failures_of_kind` counts the closure's attempts with this kind of failure, including the latest attempt.
    `may_recover` says that lost parameter servers are being recovered. `may_go_elsewhere` is called for a closure that
    has reached `Options.max_attempts`. It returns whether all attempts were lost with one worker and another worker can
    run the closure; then the worker is at fault, not the closure.
    """
    match failure.kind:
        case FailureKind.CANCELLED | FailureKind.LINK_LOST:
            # A closure that the user cancelled has its outcome already; a closure that the library cancelled runs
            # later. A broken link is not the closure's fault, and nothing runs on the worker until the link works.
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
    """Returns a closure's final exception, with notes on the closure, the task and the attempt."""
    error, closure = failure.error, attempt.closure
    if failure.kind is FailureKind.WORKER_LOST:
        alone = f" No worker but {task} could run it." if len(closure.lost_on) == 1 else ""
        error = ClosureQuarantined(
            f"{closure} was lost with its worker too often ({closure.history()}) and is not run again.{alone} See in "
            "the workers' logs whether it kills them (memory is the usual cause), or raise Options.max_attempts if "
            "machines are preempted this often."
        )
        error.original_exception = failure.error
    add_note(error, f"coordinator: {closure} failed on {task}, attempt {attempt.number}: {failure.kind.value}.")
    return error


def is_of_servers(failure: Failure) -> bool:
    """Returns whether servers or the network are the cause, or a cancellation, rather than the program."""
    return failure.kind in (*_OF_SERVERS, FailureKind.CANCELLED)


def summary(failure: Failure) -> str:
    """Returns the cause of a failure: the first line of its error, or only the class of an error about servers."""
    name = type(failure.error).__name__
    if failure.kind in _OF_SERVERS:
        return f"{failure.kind.value} ({name})"
    return f"{name}: {str(failure.error).partition(chr(10))[0]}"
