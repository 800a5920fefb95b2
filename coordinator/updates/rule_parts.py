"""What a rule works with."""

import dataclasses
import weakref
from typing import Any

from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.updates.exclusive import Exclusive
from coordinator.updates.gradient_optimizer import GradientOptimizer
from coordinator.updates.model import Model
from coordinator.updates.pulled import Pulled


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a rule works with. TensorFlow does not look into it, so it is no part of a checkpoint.

    Attributes:
      strategy: whose parameter servers have the model.
      model: the variables.
      optimizer: changes them.
      locks: one for each server, by device: held while that server's variables are changed, if `use_locking`.
      pulled: what was pulled last in each graph that is being built.
      successors: the rules that followed this one.
    """

    strategy: ParameterServerStrategy
    model: Model
    optimizer: GradientOptimizer
    locks: dict[str, Exclusive]
    pulled: weakref.WeakKeyDictionary[Any, Pulled] = dataclasses.field(default_factory=weakref.WeakKeyDictionary)
    # The type is not known here: it has one of these.
    successors: list[Any] = dataclasses.field(default_factory=list)
