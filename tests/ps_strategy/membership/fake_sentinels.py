"""Witnesses on servers that are not there: they are gone when a test says so."""

from collections.abc import Iterable, Mapping, Sequence

from coordinator.ps_strategy.membership.cluster_definition import Task


class FakeWitnesses:
    """Takes the place of the real ones.

    Attributes:
      reached: whether TensorFlow's connections serve.
      unreaching: workers that do not reach the parameter servers.
      apart: whether parameter servers do not reach each other.
      forgetful: whether parameter servers lose what they have at the next change of the cluster.
    """

    reached = True
    apart = False
    forgetful = False

    def __init__(self, longest_call: float) -> None:
        self.placed: set[int] = set()
        self.gone: set[int] = set()
        self.unreaching: set[Task] = set()

    def place(self, numbers: Mapping[str, int]) -> set[str]:
        self.placed.update(numbers.values())
        return set()

    def are_reached(self, numbers: Iterable[int]) -> bool:
        assert set(numbers) <= self.placed
        return self.reached

    def unreached_from(self, workers: Sequence[Task], numbers: Sequence[int]) -> list[Task]:
        assert set(numbers) <= self.placed
        return [worker for worker in workers if worker in self.unreaching]

    def reach_each_other(self, numbers: Sequence[int]) -> bool:
        assert set(numbers) <= self.placed
        return not self.apart

    def question(self, numbers: Iterable[int]) -> None:
        numbers = list(numbers)
        assert set(numbers) <= self.placed
        self.gone.update(numbers if self.forgetful else ())

    def are_gone(self, number: int) -> bool:
        return number in self.gone
