"""A `Handshake` and a `ClientLease` that call no server."""

from collections.abc import Collection, Mapping

from coordinator.errors import VersionMismatchError
from coordinator.ps_strategy.membership.cluster_change import Connection
from coordinator.ps_strategy.membership.cluster_definition import Task


class FakeHandshake:
    """Replaces the real handshake: it admits all but those that a test excludes.

    Attributes:
      excluded: the addresses of those that are not admitted.
      refused: what a test puts there.
    """

    def __init__(self, *_: object) -> None:
        self.excluded: set[str] = set()
        self.refused: dict[int, VersionMismatchError] = {}

    def check_devices(self, *_: object) -> None: ...

    def admit(self, new: Mapping[Task, Connection], addresses: Mapping[Task, str]) -> dict[Task, Connection]:
        return {task: connection for task, connection in new.items() if addresses[task] not in self.excluded}


class FakeLease:
    """Replaces the real handshake.

    Attributes:
      freed_on: the addresses of those that freed what the client had created there; a new connection ends that.
      held: the addresses on which the lease is renewed.
    """

    def __init__(self, *_: object) -> None:
        self.freed_on: set[str] = set()
        self.held: set[str] = set()

    def hold(self, addresses: Collection[str]) -> None:
        self.freed_on -= set(addresses)
        self.held = set(addresses)

    def freed(self, addresses: Collection[str]) -> set[str]:
        return self.freed_on & set(addresses)

    def close(self) -> None: ...


class FakeGoodbye:
    """Replaces the goodbye at the end of the process: none is said."""

    def __init__(self, *_: object) -> None:
        self.addresses: set[str] = set()

    def strategy_closes(self) -> None: ...
