"""The parameter server of each new variable: round robin, unless that gives one server much more than another.

Variables of the same size, and small ones whatever their size, go to one server after the other, as in TensorFlow. A
large one goes to the server that holds the fewest bytes if the next one in turn would hold a quarter more than that.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# Smaller variables are placed in turn, in bytes.
_LARGE = 2**20
_TOLERATED = 1.25


class Placement:
    """Chooses servers. Thread-safe; variables that several threads create at once are counted when they exist.

    Args:
      devices: of the parameter servers.
      variables: returns the variables that exist.
    """

    def __init__(self, devices: Sequence[str], variables: Callable[[], Iterable[Any]]) -> None:
        self._devices = devices
        self._variables = variables
        # Tables are counted too. `next` is atomic: placement is round robin even if several threads create variables.
        self._numbers = itertools.count()

    def next_devices(self, sizes: Sequence[int]) -> list[str]:
        """Returns the devices of new variables.

        Args:
          sizes: in bytes, 0 if it is not known.
        """
        held = self._held() if max(sizes) >= _LARGE else dict.fromkeys(self._devices, 0)
        return [self._next(size, held) for size in sizes]

    def _next(self, size: int, held: dict[str, int]) -> str:
        """Chooses a server, and adds the variable to the bytes that it holds."""
        number = next(self._numbers) % len(self._devices)
        device = self._devices[number]
        # The first of several, in turn.
        least = min((*self._devices[number:], *self._devices[:number]), key=held.__getitem__)
        if size >= _LARGE and held[device] + size > _TOLERATED * (held[least] + size):
            device = least
        held[device] += size
        return device

    def _held(self) -> dict[str, int]:
        held = dict.fromkeys(self._devices, 0)
        for variable in self._variables():
            # What is in parts holds nothing itself.
            if variable.device in held and not hasattr(variable, "parts"):
                held[variable.device] += (variable.shape.num_elements() or 0) * variable.dtype.size
        return held
