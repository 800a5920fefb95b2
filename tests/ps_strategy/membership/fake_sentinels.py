"""Sentinel variables without servers: a test decides which are lost."""

from collections.abc import Collection, Mapping, Sequence

from coordinator.ps_strategy.membership.cluster_definition import Task


class FakeSentinels:
    """Replaces the real sentinel variables.

    Attributes:
      reachable: whether TensorFlow's connections work.
      unreaching: workers that do not reach the parameter servers.
      apart: whether parameter servers do not reach each other.
      lossy: whether servers lose their variables at the next change of the cluster.
    """

    reachable = True
    apart = False
    lossy = False

    def __init__(self, longest_call: float) -> None:
        self.placed: set[int] = set()
        self.unreaching: set[Task] = set()

    def place(self, devices: Mapping[int, str]) -> set[int]:
        self.placed = set(devices)
        return set()

    def are_reachable(self, numbers: Collection[int]) -> bool:
        assert set(numbers) <= self.placed
        return self.reachable

    def unreached_from(self, workers: Sequence[Task], numbers: Sequence[int]) -> list[Task]:
        assert set(numbers) <= self.placed
        return [worker for worker in workers if worker in self.unreaching]

    def reach_each_other(self, numbers: Sequence[int]) -> bool:
        assert set(numbers) <= self.placed
        return not self.apart

    def gone(self, numbers: Collection[int]) -> set[int]:
        assert set(numbers) <= self.placed
        return set(numbers) if self.lossy else set()
