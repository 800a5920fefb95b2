"""Every error that the library raises by its own decision.

A user's own exception, raised inside a scheduled function, is never wrapped: it is raised as itself, with notes that
say where it happened (`describe_failure`).

    CoordinatorError
     x  ClusterSpecError          (ValueError)      the cluster, TF_CONFIG or an address is wrong
     x  VersionMismatchError      (RuntimeError)    a server runs another TensorFlow than the client
     x  TaskLost                                    a server went away
     |   x  WorkerLost
     |   x  ParameterServerLost
     x  ClosureError                                one closure did not give a result
     |   x  ClosureInputError                       an input of it could not be made
     |   x  ClosureCancelledError (CancelledError)  it was withdrawn: another closure failed, or the strategy closed
     |   x  ClosureQuarantined                 it lost too many workers to be handed round further
     x  StrategyClosedError       (RuntimeError)    the strategy is closed
     x  InvalidTransitionError    (RuntimeError)    a defect of this library: a state changed in a way not allowed
     x  LaunchError               (RuntimeError)    a server or a program could not be started
     x  EvaluationError           (RuntimeError)    a checkpoint cannot be evaluated
     x  SettingError              (ValueError)      a simulation or an experiment was given something that cannot be
"""

import concurrent.futures


class CoordinatorError(Exception):
    """The base of all errors of this library."""


class ClusterSpecError(CoordinatorError, ValueError):
    """The description of the cluster is wrong; the message says what to change."""


class VersionMismatchError(CoordinatorError, RuntimeError):
    """A server runs another TensorFlow than this program; the message says which, and what to do."""


class TaskLost(CoordinatorError):
    """A server of the cluster went away.

    Attributes:
      task: its name, such as `/job:worker/task:1`.
    """

    def __init__(self, task: str, message: str):
        super().__init__(task, message)
        self.task = task

    def __str__(self) -> str:
        return str(self.args[1])


class WorkerLost(TaskLost):
    """A worker went away while it was needed."""


class ParameterServerLost(TaskLost):
    """A parameter server went away, and the variables on it with it."""


class ClosureError(CoordinatorError):
    """A scheduled closure did not give a result."""


class ClosureInputError(ClosureError):
    """An input of the closure (a per-worker dataset, iterator, variable or table) could not be made."""


class ClosureCancelledError(ClosureError, concurrent.futures.CancelledError):
    """The closure was withdrawn before it finished. Schedule it again if it is still wanted."""


class ClosureQuarantined(ClosureError):
    """Every worker that ran the closure was lost, too often to be chance: it is not run again."""


class StrategyClosedError(CoordinatorError, RuntimeError):
    """The strategy was closed and schedules no more."""


class InvalidTransitionError(CoordinatorError, RuntimeError):
    """A closure or a worker was asked to change state in a way that its table does not allow."""


class LaunchError(CoordinatorError, RuntimeError):
    """A server process or a program could not be started."""


class EvaluationError(CoordinatorError, RuntimeError):
    """A checkpoint cannot be evaluated; the message says why, and what to change."""


class SettingError(CoordinatorError, ValueError):
    """A setting of a simulation or an experiment is wrong; the message names it and says what is allowed.

    Attributes:
      option: its name.
      complaint: what is wrong with it.
    """

    def __init__(self, option: str, complaint: str):
        super().__init__(option, complaint)
        self.option = option
        self.complaint = complaint

    def __str__(self) -> str:
        return f"{self.option} {self.complaint}"
