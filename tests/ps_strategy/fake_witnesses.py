"""Witnesses on servers that are not there: they are gone when a test says so."""

from collections.abc import Iterable, Mapping


class FakeWitnesses:
    """Takes the place of the real ones.

    Attributes:
      reached: whether TensorFlow's connections serve.
      forgetful: whether parameter servers lose what they have at the next change of the cluster.
    """

    reached = True
    forgetful = False

    def __init__(self) -> None:
        self.placed: set[int] = set()
        self.gone: set[int] = set()

    def place(self, numbers: Mapping[str, int]) -> set[str]:
        self.placed.update(numbers.values())
        return set()

    def are_reached(self, numbers: Iterable[int]) -> bool:
        assert set(numbers) <= self.placed
        return self.reached

    def question(self, numbers: Iterable[int]) -> None:
        numbers = list(numbers)
        assert set(numbers) <= self.placed
        self.gone.update(numbers if self.forgetful else ())

    def are_gone(self, number: int) -> bool:
        return number in self.gone
