"""A line that one leaves from the front, or from anywhere in it, at the same cost.

A plain data structure without a lock. It weighs two references in each that stands in it, and nothing beside: there
may be a million.
"""

from collections.abc import Iterator
from typing import Any, Generic, TypeVar


class Place:
    """What may stand in a `Line`, and in one at a time.

    Attributes:
      ahead: its neighbour towards the front; None if it stands in no line.
      behind: its neighbour towards the end.
    """

    __slots__ = ("ahead", "behind")

    def __init__(self) -> None:
        self.ahead: Any = None
        self.behind: Any = None

    @property
    def is_in_line(self) -> bool:
        """Whether it stands in a line."""
        return self.ahead is not None


_Place = TypeVar("_Place", bound=Place)


class Line(Generic[_Place]):
    """Places in order."""

    __slots__ = ("_ends", "_length")

    def __init__(self) -> None:
        # Stands before the first and behind the last, so that neither is a special case.
        self._ends = Place()
        self._ends.ahead = self._ends.behind = self._ends
        self._length = 0

    def append(self, place: _Place) -> None:
        """To the end."""
        self._length += 1
        _insert(place, self._ends.ahead, self._ends)

    def push_front(self, place: _Place) -> None:
        """To the front."""
        self._length += 1
        _insert(place, self._ends, self._ends.behind)

    def remove(self, place: _Place) -> None:
        """Takes it out; it must stand here."""
        self._length -= 1
        place.ahead.behind = place.behind
        place.behind.ahead = place.ahead
        place.ahead = place.behind = None

    def pop_front(self) -> _Place:
        """Takes out the first; there must be one."""
        first: _Place = self._ends.behind
        self.remove(first)
        return first

    def __iter__(self) -> Iterator[_Place]:
        place = self._ends.behind
        while place is not self._ends:
            yield place
            place = place.behind

    def __len__(self) -> int:
        return self._length


def _insert(place: Place, ahead: Place, behind: Place) -> None:
    place.ahead = ahead
    place.behind = behind
    ahead.behind = behind.ahead = place
