"""The exceptions that this library defines.

An exception of a scheduled function is never wrapped: it is raised unchanged, with notes that say where it happened.

    CoordinatorError
     x  ClusterSpecError          (ValueError)      the cluster, TF_CONFIG or an address is wrong
     x  VersionMismatchError      (RuntimeError)    a server runs another TensorFlow than the client
     x  DeviceMismatchError       (RuntimeError)    a worker has other devices than the rest
     x  TaskLost                                    a server went away
     |   x  WorkerLost
     |   x  ParameterServerLost
     x  ClosureError                                one closure did not give a result
     |   x  ClosureInputError                       an input of the closure could not be created
     |   x  ClosureCancelledError (CancelledError)  another closure failed, or the strategy was closed
     |   x  ClosureQuarantined                      the closure was lost with its worker too often
     x  CheckpointsTakenOver      (RuntimeError)    another client uses the directory of the checkpoints
     x  StrategyClosedError       (RuntimeError)    the strategy is closed
     x  InvalidTransitionError    (RuntimeError)    a defect of this library: a state change that is not allowed
     x  LaunchError               (RuntimeError)    a server or a program could not be started
     x  EvaluationError           (RuntimeError)    a checkpoint cannot be evaluated
     x  SettingError              (ValueError)      a setting has a value that is not allowed
"""

import concurrent.futures
import dataclasses
import sys

if sys.version_info < (3, 11):
    # Lets Python 3.10 print the notes of exceptions.
    import exceptiongroup  # noqa: F401


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollback:
    """A recovery of lost parameter servers, which set all variables back to a checkpoint.

    Steps come from `ParameterServerStrategy.restore_from(step=)`. Without `step=`, steps count finished functions.
    Steps are None if unknown, because `restore_from` was given a function that restores.

    Attributes:
      parameter_servers: the names of the lost servers, such as `/job:ps/task:0`.
      checkpoint: the path of the restored checkpoint; None if variables have initial values, for lack of a checkpoint.
      step_before: the step at the loss, an estimate that does not count functions that were running at the loss.
      step_after: the step from which training continues.
      seconds: the time from the first recovery attempt until the variables were restored, in seconds.
    """

    parameter_servers: tuple[str, ...]
    checkpoint: str | None
    step_before: int | None
    step_after: int | None
    seconds: float

    @property
    def steps_lost(self) -> int | None:
        """How many steps must be repeated; None if unknown."""
        if self.step_before is None or self.step_after is None:
            return None
        return self.step_before - self.step_after

    def __str__(self) -> str:
        where = f"checkpoint {self.checkpoint}" if self.checkpoint else "the initial values"
        steps = "" if self.steps_lost is None else f", {self.steps_lost} steps back, at step {self.step_after}"
        return f"{', '.join(self.parameter_servers)} recovered from {where}{steps} ({self.seconds:.1f} s)"


class CoordinatorError(Exception):
    """The base of all errors of this library."""


class ClusterSpecError(CoordinatorError, ValueError):
    """The description of the cluster is wrong; the message says what to change."""


class VersionMismatchError(CoordinatorError, RuntimeError):
    """A server runs another TensorFlow version than this program; the message names the server and says what to do."""


class DeviceMismatchError(CoordinatorError, RuntimeError):
    """A worker's devices differ in number or kind from the devices of other workers; the message names the worker."""


class TaskLost(CoordinatorError):
    """A server of the cluster went away.

    Attributes:
      task: the server's task name, such as `/job:worker/task:1`.
      original_exception: the TensorFlow error that revealed the loss, if any. This error is logged at level DEBUG, and
        is not part of the traceback, where pages of gRPC details would hide the cause.
    """

    original_exception: BaseException | None = None

    def __init__(self, task: str, message: str):
        super().__init__(task, message)
        self.task = task

    def __str__(self) -> str:
        return str(self.args[1])


class WorkerLost(TaskLost):
    """A worker went away while it was needed."""


class ParameterServerLost(TaskLost):
    """A parameter server went away, and its variables with it."""


class ClosureError(CoordinatorError):
    """A scheduled closure has no result."""


class ClosureInputError(ClosureError):
    """An input of the closure (a per-worker dataset, iterator, variable or table) could not be created."""

    @property
    def original_exception(self) -> BaseException | None:
        """The exception that creating the input raised, which is also `__cause__`. TensorFlow uses this name."""
        return self.__cause__


class ClosureCancelledError(ClosureError, concurrent.futures.CancelledError):
    """The closure was cancelled before it finished. Reschedule the closure if you still need it."""


class ClosureQuarantined(ClosureError):
    """The closure was lost with its worker `Options.max_attempts` times, and is not run again.

    Attributes:
      original_exception: the error of the last attempt; see `TaskLost`.
    """

    original_exception: BaseException | None = None


class CheckpointsTakenOver(CoordinatorError, RuntimeError):
    """Another client began to use the checkpoint directory after this client; the message names the other client.

    The attribute `directory` is the checkpoint directory.
    """

    def __init__(self, directory: str, message: str):
        super().__init__(directory, message)
        self.directory = directory

    def __str__(self) -> str:
        return str(self.args[1])


class StrategyClosedError(CoordinatorError, RuntimeError):
    """The strategy was closed and no longer schedules anything."""


class InvalidTransitionError(CoordinatorError, RuntimeError):
    """A closure or a worker was about to make a state transition that is not allowed: a defect of the library."""


class LaunchError(CoordinatorError, RuntimeError):
    """A server process or a program could not be started."""


class EvaluationError(CoordinatorError, RuntimeError):
    """A checkpoint cannot be evaluated; the message says why, and what to change."""


class SettingError(CoordinatorError, ValueError):
    """A setting is wrong; the message names it and says what is allowed.

    Attributes:
      option: the setting's name.
      reason: what is wrong with the setting.
    """

    def __init__(self, option: str, reason: str):
        super().__init__(option, reason)
        self.option = option
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.option} {self.reason}"


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an exception, as `BaseException.add_note` of Python 3.11."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]  # of Python 3.11
