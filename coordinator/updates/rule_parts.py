"""What a rule works with."""

import dataclasses
from typing import Any

from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.updates.gradient_optimizer import GradientOptimizer
from coordinator.updates.state.server_mutex import Exclusive
from coordinator.updates.transport.model import Model


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a rule works with. TensorFlow does not look into it, so it is no part of a checkpoint.

    Attributes:
      strategy: whose parameter servers have the model.
      model: the variables.
      optimizer: changes them.
      locks: one for each server, by device: held while that server's variables are changed, if `use_locking`.
      key: what was pulled in a graph that is being built is found there under this name.
      successor: the rule that followed this one, if one has.
    """

    strategy: ParameterServerStrategy
    model: Model
    optimizer: GradientOptimizer
    locks: dict[str, Exclusive]
    key: str
    # The type is not known here: it has one of these.
    successor: list[Any] = dataclasses.field(default_factory=list)
