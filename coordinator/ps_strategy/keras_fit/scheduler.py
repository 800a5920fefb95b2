"""What training in Keras' loop asks of a strategy."""

from collections.abc import Sequence
from typing import Any, Protocol

from coordinator.cluster import Cluster
from coordinator.future import Future


class Scheduler(Protocol):
    """The part of `ParameterServerStrategy` that a loop uses."""

    @property
    def cluster(self) -> Cluster:
        """The workers."""

    def schedule(self, fn: Any, args: Sequence[Any] | None = None, *, worker: int | None = None) -> Future:
        """Queues one call."""

    def join(self) -> None:
        """Waits for all calls, and raises what failed."""
