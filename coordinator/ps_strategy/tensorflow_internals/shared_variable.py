"""Variables that many workers read and change at once.

They keep every addition, to all of a variable or to some of its rows, however many workers add at the same time.
Scalars are read once by a function that uses them many times, as an optimizer uses its learning rate and its count of
updates for each variable of a model.
"""

import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import resource_variable_ops

from coordinator.ps_strategy.tensorflow_internals.additions import change_of
from coordinator.ps_strategy.tensorflow_internals.exclusive_scatter import ExclusiveScatter
from coordinator.ps_strategy.tensorflow_internals.present_values import value_read_before


def make_shared(variable: Any) -> None:
    """Makes a variable one that functions which run at the same time may change.

    From now on, `variable.assign(variable + x)` and `- x` lose nothing, where the value was read in the same function,
    and not changed by it in between. Other assignments are as they were. Nor is anything lost of `scatter_add`,
    `scatter_sub`, `scatter_max`, `scatter_min` and `scatter_update`.

    A scalar that is not trainable is read once by a function, and again after the function has changed it, in the body
    of a loop, and where the function says that the read is to wait for something. `read_value()` always reads.
    """
    # Private: the classes of variables have no public names, and are chosen where nobody can choose others. A function
    # that makes a variable when it is traced first has a class of its own for it.
    if isinstance(variable, resource_variable_ops.BaseResourceVariable):
        kind: Any = type(variable)
        variable.__class__ = _shared(kind)


@functools.cache
def _shared(kind: Any) -> Any:
    return type(f"Shared{kind.__name__}", (_Shared, kind), {"__module__": __name__})


class _Shared(ExclusiveScatter):
    """Assigning it its own value plus something adds that, atomically; its value is read no more than needed."""

    def assign(self, value: Any, use_locking: Any = None, name: str | None = None, read_value: bool = True) -> Any:
        """Assigns, adds or subtracts; what it returns is as ever."""
        variable: Any = self
        change = change_of(variable, value)
        if change is None:
            return super().assign(value, use_locking, name, read_value)  # type: ignore[misc]  # of the other base
        add, amount = change
        if amount.shape != variable.shape:
            amount = tf.broadcast_to(amount, variable.shape)
        return (variable.assign_add if add else variable.assign_sub)(amount, use_locking, name, read_value)

    def value(self) -> Any:
        """The value, as the function that is being traced has read it already, if that will do."""
        before = None if tf.executing_eagerly() or not _may_share_reads(self) else value_read_before(self)
        return super().value() if before is None else before  # type: ignore[misc]  # of the other base


def _may_share_reads(variable: Any) -> bool:
    """Whether one read of a variable may serve all that a function needs it for."""
    # The values of others are worth more than a message, so that a server should not keep a copy. Private: what
    # `reads_replaced` does, and that a gradient tape looks for the read itself.
    return bool(
        variable.shape.rank == 0
        and not variable.trainable
        and "_read_variable_op" not in vars(variable)
        and not record.should_record_backprop([variable.handle])
    )
