"""The least of many whole numbers that come and go."""


class LeastValue:
    """Whole numbers, of which the least is known at any time, at a cost that does not grow with how many there are.

    It is made for numbers that grow, as clocks and versions do: what comes is not below the least by much, or at all.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._size = 0
        self._least = 0

    def add(self, value: int) -> None:
        """Takes one in."""
        if not self._counts or value < self._least:
            self._least = value
        self._counts[value] = self._counts.get(value, 0) + 1
        self._size += 1

    def remove(self, value: int) -> None:
        """Takes one out that is there."""
        counts = self._counts
        left = counts[value] - 1
        self._size -= 1
        if left:
            counts[value] = left
            return
        del counts[value]
        if counts and value == self._least:
            while value not in counts:
                value += 1
            self._least = value

    def least(self, default: int) -> int:
        """The least, or a default where there is none."""
        return self._least if self._counts else default

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"<LeastValue of {self._size}: {self._least if self._counts else 'none'}>"
