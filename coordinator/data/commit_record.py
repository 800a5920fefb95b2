"""What epochs need to know of an update rule that commits each of their ranges once."""

from collections.abc import Iterable
from typing import Protocol


class CommitRecord(Protocol):
    """The ranges that a rule has committed, on a parameter server."""

    def waiting(self) -> Iterable[int]:
        """Returns those whose gradients wait for an update, and are in no checkpoint."""

    def recover(self) -> None:
        """Forgets all ranges, unless they were restored with the epochs, or neither was. While no function runs."""
