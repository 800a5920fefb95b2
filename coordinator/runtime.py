"""All that the core asks of whatever runs closures.

The core (queue, workers, cluster) knows nothing of TensorFlow: it hands `Work` to a `Runtime` and gets back a result or
an error, which the runtime sorts into one of a few kinds. `coordinator.ps_strategy` implements it over TensorFlow
servers, `coordinator.testing.FakeRuntime` in memory with faults on request.

A runtime promises: `run` blocks its caller alone, and no other method that a worker calls raises; `reconnect` is safe
from several threads.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, Protocol

from coordinator.errors import ParameterServerLost


class FailureKind(enum.Enum):
    """Whose fault it is that a closure did not finish, which decides what happens next."""

    WORKER_LOST = "worker lost"
    PARAMETER_SERVER_LOST = "parameter server lost"
    TRANSIENT = "transient"
    INPUT = "input could not be made"
    CANCELLED = "cancelled"
    USER = "user's own error"


@dataclasses.dataclass(frozen=True)
class Failure:
    """One failed attempt, sorted.

    Attributes:
      kind: whose fault it is.
      error: the exception to raise for it, which may name the fault better than the one that was caught.
    """

    kind: FailureKind
    error: BaseException


class Cancellation(Protocol):
    """Reaches every call that was started with it."""

    def cancel(self) -> None:
        """Cancels those calls; each ends soon with an error of kind CANCELLED. Calling it again does nothing."""


class Runtime(Protocol):
    """Runs work on numbered workers."""

    @property
    def worker_devices(self) -> Sequence[str]:
        """The name of each worker, by index, such as `/job:worker/replica:0/task:0`."""

    def bind_thread(self, worker: int) -> None:
        """Prepares the calling thread to run work on `worker`; called once at the thread's start."""

    def run(self, worker: int, work: Any, cancellation: Cancellation) -> Any:
        """Runs `work` on `worker` and returns its result, copied to the client. Raises whatever went wrong."""

    def classify(self, worker: int, error: BaseException) -> Failure:
        """Sorts an error that `run` raised on `worker`, looking at which tasks answer now."""

    def is_reachable(self, worker: int) -> bool:
        """Whether `worker` answers a probe now, and is the server that we are connected to."""

    def reconnect(self, worker: int) -> bool:
        """Tries once to connect to `worker` again after it was lost; False if it does not answer."""

    def lost_parameter_server(self) -> ParameterServerLost | None:
        """The error that names a parameter server that is gone, if one is."""

    def new_cancellation(self) -> Cancellation:
        """A cancellation that has not been used yet."""

    def close(self) -> None:
        """Lets every server go. Nothing is run afterwards."""
