"""Where the parts of a table are: on the parameter servers of a strategy, or in this process.

A table in one process is for what needs no cluster: predictions, evaluation beside training, a notebook, tests. It
reads the checkpoints of the same table on servers, and the servers read its own.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.keras.internals.table_updates import table_updates
from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.ps_strategy.recovery.variable_store import Recovered
from coordinator.ps_strategy.tensorflow_internals.checkpoint_savers import savers_replaced
from coordinator.ps_strategy.tensorflow_internals.process import current_server_def

_NUMBERS = itertools.count()
# What a strategy replaces while it is open, for tables; as long as the process.
_REPLACED = contextlib.ExitStack()


@dataclasses.dataclass(frozen=True)
class TablePlace:
    """The devices of a table's parts.

    Attributes:
      devices: a CPU for each part.
      number: unique among the tables of the same devices.
      refuse_closed: raises `StrategyClosedError`, which says what was called, if the strategy is closed.
      add_recovered: see `VariableStore`.
    """

    devices: Sequence[str]
    number: int
    refuse_closed: Callable[[str], None]
    add_recovered: Callable[[Recovered], None]

    @classmethod
    def of_scope(cls) -> "TablePlace":
        """Returns the place of a table that is created now.

        Raises:
          RuntimeError: in the scope of another strategy, or outside of the scope while a strategy is open.
        """
        strategy: Any = tf.distribute.get_strategy()
        if isinstance(strategy, ParameterServerStrategy):
            services = strategy.extended.services
            number, devices = next(services.unique_numbers), strategy.extended.parameter_devices
            return cls(devices, number, services.refuse_closed, services.variables.add_recovered)
        definition = current_server_def()
        if tf.distribute.has_strategy() or (definition is not None and len(definition.cluster.job) > 1):
            raise RuntimeError(
                "A table is created inside strategy.scope() of a coordinator.ParameterServerStrategy, or in a process "
                "that has no strategy."
            )
        number = next(_NUMBERS)
        if number == 0:
            _REPLACED.enter_context(savers_replaced(_NoLargeVariables()))
            _REPLACED.enter_context(table_updates())
        with tf.init_scope(), tf.device("/device:CPU:0"):
            device: str = tf.zeros([]).device
        return cls((device,), number, lambda _: None, lambda _: None)


class _NoLargeVariables:
    """Leaves all variables to TensorFlow; see `LargeVariables`."""

    def to_write(self, *_: Any) -> Sequence[Any]:
        """Returns none."""
        return ()

    to_read = write = to_write

    def read(self, *_: Any) -> None:
        """Reads nothing."""
