"""All that the core asks of whatever runs closures.

The core (queue, workers, cluster) knows nothing of TensorFlow: it hands `Work` to a `Runtime` and gets back a result or
an error, which the runtime sorts into one of a few kinds. `coordinator.ps_strategy` implements it over TensorFlow
servers, `coordinator.testing.FakeRuntime` in memory with faults on request.

A runtime promises: `run` blocks its caller alone, and comes back when its server is lost, frozen ones included; no
other method that a worker calls raises; `reconnect` is safe from several threads. It numbers its workers by task index.
"""

import dataclasses
import enum
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

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


class Likeness(NamedTuple):
    """What makes works fit for one call: those that are equal in both.

    Attributes:
      function: what they have to run; how long that takes is learned for all that are equal in it.
      arguments: what they must have in common besides.
    """

    function: Hashable
    arguments: Hashable


class Cancellation(Protocol):
    """Reaches every call that was started with it."""

    def cancel(self) -> None:
        """Cancels those calls; each ends soon with an error of kind CANCELLED. Calling it again does nothing."""


class Runtime(Protocol):
    """Runs work on numbered workers."""

    @property
    def worker_addresses(self) -> Mapping[int, str]:
        """Where each worker is (`host:port`), by index."""

    def worker_device(self, worker: int) -> str:
        """The name of a worker, such as `/job:worker/replica:0/task:0`."""

    def add_worker(self, worker: int, address: str) -> None:
        """From now on there is a worker of this index; `reconnect` connects to it. Raises ValueError."""

    def move_worker(self, worker: int, address: str) -> None:
        """The worker is at another address now: it counts as lost until `reconnect`. Raises ValueError."""

    def remove_worker(self, worker: int) -> None:
        """Lets a worker go; nothing is run on it afterwards."""

    def bind_thread(self, worker: int) -> None:
        """Prepares the calling thread to run work on `worker`; called once at the thread's start."""

    def run(self, worker: int, work: Any, cancellation: Cancellation) -> Any:
        """Runs `work` on `worker` and returns its result, copied to the client. Raises whatever went wrong."""

    def likeness(self, worker: int, work: Any) -> Likeness | None:
        """Works for which it is equal may run in one call on `worker`; None for none. Runs no code of the user's."""

    def run_fused(self, worker: int, works: Sequence[Any], cancellation: Cancellation) -> Sequence[Any]:
        """Runs works that are alike in one call, each after the one before has ended; their results, in order.

        Raises whatever went wrong with any of them.
        """

    def classify(self, worker: int, error: BaseException) -> Failure:
        """Sorts an error that `run` raised on `worker`, looking at which tasks answer now."""

    def is_reachable(self, worker: int) -> bool:
        """Whether `worker` answers a probe now, and is the server that we are connected to."""

    def seems_reachable(self, worker: int) -> bool:
        """The same, by the last that was heard of it. Asks nobody. Safe from any thread; False for a removed worker."""

    def disconnect(self, worker: int) -> None:
        """Lets go of a worker that was lost, so that nothing waits for it before it is reconnected."""

    def reconnect(self, worker: int) -> bool:
        """Tries once to connect to `worker` again after it was lost; False if it does not answer."""

    def lost_parameter_server(self) -> ParameterServerLost | None:
        """The error that names a parameter server that is gone, if one is."""

    def seem_parameter_servers_reachable(self) -> bool:
        """Whether all parameter servers are there, by the last that was heard of them. Asks nobody."""

    def new_cancellation(self) -> Cancellation:
        """A cancellation that has not been used yet."""

    def close(self) -> None:
        """Lets every server go. Nothing is run afterwards."""
