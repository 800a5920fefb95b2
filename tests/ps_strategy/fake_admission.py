"""A `ServerAdmission` that asks no server: it admits whoever is not strange, and forgets on request."""

from collections.abc import Mapping

from coordinator.ps_strategy.membership.cluster_definition import Task
from coordinator.ps_strategy.server_admission import Run


class FakeAdmission:
    """Takes the place of the real one.

    Attributes:
      strange: the addresses of those that are not admitted.
      forgetful: the addresses of those that freed what the client had made on them; a new connection ends that.
    """

    def __init__(self, *_: object) -> None:
        self.strange: set[str] = set()
        self.forgetful: set[str] = set()

    def admit(self, connected: Mapping[Task, Run], addresses: Mapping[Task, str]) -> dict[Task, Run]:
        self.forgetful -= {addresses[task] for task in connected}
        return {task: run for task, run in connected.items() if addresses[task] not in self.strange}

    def is_refused(self, incarnation: int) -> bool:
        return False

    def raise_refusal(self) -> None: ...

    def is_forgotten(self, address: str) -> bool:
        return address in self.forgetful

    def close(self) -> None: ...
