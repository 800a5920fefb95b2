"""A `Handshake` that asks no server: it admits all but those that a test refuses."""

from collections.abc import Collection, Mapping

from coordinator.ps_strategy.membership.cluster_change import Connection
from coordinator.ps_strategy.membership.cluster_definition import Task


class FakeHandshake:
    """Takes the place of the real one.

    Attributes:
      refused: the addresses of those that are not admitted.
      freed_on: the addresses of those that freed what the client had created there; a new connection ends that.
    """

    def __init__(self, *_: object) -> None:
        self.refused: set[str] = set()
        self.freed_on: set[str] = set()

    def admit(self, connected: Mapping[Task, Connection], addresses: Mapping[Task, str]) -> dict[Task, Connection]:
        self.freed_on -= {addresses[task] for task in connected}
        return {task: connection for task, connection in connected.items() if addresses[task] not in self.refused}

    def is_refused(self, incarnation: int) -> bool:
        return False

    def raise_refusal(self) -> None: ...

    def freed(self, addresses: Collection[str]) -> set[str]:
        return self.freed_on & set(addresses)

    def close(self) -> None: ...
