"""Gradients that arrived at a server."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from coordinator.updates.transport.model import flat


@dataclasses.dataclass(frozen=True)
class SentGradients:
    """Gradients that arrived at a server.

    Attributes:
      device: the server's CPU.
      numbers: the positions of their variables.
      gradients: in that order.
      extras: what was sent with them.
      size: all of it, in bytes, an int64 scalar on the worker.
    """

    device: str
    numbers: Sequence[int]
    gradients: Sequence[Any]
    extras: Sequence[Any]
    size: Any

    @property
    def tensors(self) -> list[Any]:
        """Everything that arrived."""
        return [*flat(dict(zip(self.numbers, self.gradients, strict=True)), self.numbers), *self.extras]
