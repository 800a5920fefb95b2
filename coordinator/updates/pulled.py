"""What a step knows from its pull."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.updates.transport.gradients import awaiting


@dataclasses.dataclass(frozen=True)
class Pulled:
    """What a step knows from its pull.

    Attributes:
      version: the model version that was pulled, an int64 scalar.
      worker: the index of the worker, an int64 scalar.
      scalars: the values of the optimizer's scalars.
      kept: what the rule's own pull keeps for its push; None if the pull was in another function.
      checks: what has to be done on the worker before the push changes anything; the other tensors wait for it.
    """

    version: Any
    worker: Any
    scalars: Sequence[Any]
    kept: Any = None
    checks: Sequence[Any] = ()

    def after(self, checks: Sequence[Any]) -> "Pulled":
        """The same, which is there when the checks of a push are made."""
        if not checks:
            return self
        version, worker, *scalars = (awaiting(checks, each) for each in (self.version, self.worker, *self.scalars))
        return dataclasses.replace(self, version=version, worker=worker, scalars=scalars, checks=checks)


@dataclasses.dataclass(frozen=True)
class ModelCopies:
    """A model as it was pulled.

    Attributes:
      values: tensors on the worker, by the positions of their variables.
      scalars: the values of the optimizer's scalars.
      version: of the model, an int64 scalar.
      size: how much was brought, in bytes, an int64 scalar.
      pulls: 1, or 0 where nothing had to be brought; may be an int64 scalar.
      kept: whatever the rule wants to find at the push.
    """

    values: Mapping[int, Any]
    scalars: Sequence[Any]
    version: Any
    size: Any
    pulls: Any
    kept: Any = None
