"""Sorts TensorFlow's errors into the kinds that the core knows, in one place.

The sort goes by evidence first: a task that does not answer, or that answers as another incarnation than the one we
connected to, is lost, whatever the error said. Only when all tasks are well does the error's own class decide, by the
table below. The message is never searched.
"""

import tensorflow as tf

from coordinator.errors import ClosureCancelledError, ClosureInputError, ParameterServerLost
from coordinator.runtime import Failure, FailureKind

# Raised although every task is alive: a connection was refused or reset between two of them, or a server was about to
# let go of a context that has been renewed since. Another attempt may go well.
_TRANSIENT = (tf.errors.UnavailableError, tf.errors.AbortedError)

# What the client's own calls raise when a server cannot be reached for the moment, although it may answer by now.
UNREACHED = (*_TRANSIENT, tf.errors.DeadlineExceededError)


def failure_of(error: BaseException, parameter_server: ParameterServerLost | None, is_worker_lost: bool) -> Failure:
    """Sorts an error.

    Args:
      error: what the attempt raised.
      parameter_server: the error that names a lost parameter server, if one is lost.
      is_worker_lost: whether the worker that made the attempt is lost.
    """
    if isinstance(error, ClosureCancelledError):
        return Failure(FailureKind.CANCELLED, error)
    cause = error.__cause__ if isinstance(error, ClosureInputError) else error
    if isinstance(cause, tf.errors.OpError):
        if parameter_server is not None:
            parameter_server.__cause__ = cause
            return Failure(FailureKind.PARAMETER_SERVER_LOST, parameter_server)
        if is_worker_lost:
            return Failure(FailureKind.WORKER_LOST, error)
        if isinstance(cause, _TRANSIENT):
            return Failure(FailureKind.TRANSIENT, error)
    if isinstance(error, ClosureInputError):
        return Failure(FailureKind.INPUT, error)
    return Failure(FailureKind.USER, error)
