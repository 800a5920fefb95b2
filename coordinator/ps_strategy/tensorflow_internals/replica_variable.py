"""Variables that several replicas of a worker read and change: read once, and changed once, by what all want.

As for `tf.distribute`, the `aggregation` of a variable says what a change in a replica does: that of `SUM` is by the
sum of what the replicas give, that of `MEAN` by their mean, that of `ONLY_FIRST_REPLICA` by what the first gives.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import resource_variable_ops

from coordinator.ps_strategy.tensorflow_internals.replica_threads import is_one_of_several
from coordinator.ps_strategy.tensorflow_internals.replica_values import aggregated, parts_of_replicas
from coordinator.ps_strategy.tensorflow_internals.shared_variable import change_of, value_read_before, with_mixin

_AGGREGATION = tf.VariableAggregation
_SCATTERS = ("add", "div", "max", "min", "mul", "sub", "update", "nd_add", "nd_max", "nd_min", "nd_sub", "nd_update")


def make_replicated(variable: Any, *, is_keras: bool) -> None:
    """Changes the class of a variable, so that the replicas of a worker share its reads, and aggregate its changes.

    Args:
      variable: was created with an aggregation. Without one, replicas may not change it, as in TensorFlow. Keras
        changes its own so, which become the mean of what the replicas assign, as in `BatchNormalization`; integers are
        changed by one replica after the other, as the state of a seed, of which each replica draws other numbers. But
        what replicas add to a weight is refused.
      is_keras: whether it belongs to a Keras variable.
    """
    if isinstance(variable, resource_variable_ops.BaseResourceVariable):
        kind: Any = type(variable)
        variable.__class__ = with_mixin(_Replicated, kind)
        variable.is_of_keras = is_keras


class _Replicated:
    """The mixin. In a replica that is not alone, other methods do what they do elsewhere."""

    def assign(self, value: Any, use_locking: Any = None, name: str | None = None, read_value: bool = True) -> Any:
        """Assigns; arguments and result are those of `tf.Variable.assign`, as below."""
        return _change(self, "assign", value, super().assign, use_locking, name, read_value)  # type: ignore[misc]

    def assign_add(self, delta: Any, use_locking: Any = None, name: str | None = None, read_value: bool = True) -> Any:
        """Adds."""
        return _change(self, "assign_add", delta, super().assign_add, use_locking, name, read_value)  # type: ignore[misc]

    def assign_sub(self, delta: Any, use_locking: Any = None, name: str | None = None, read_value: bool = True) -> Any:
        """Subtracts."""
        return _change(self, "assign_sub", delta, super().assign_sub, use_locking, name, read_value)  # type: ignore[misc]

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        # Private: every way to read a whole value goes through it.
        before = value_read_before(self) if is_one_of_several() else None
        if before is None:
            return super()._read_variable_op(no_copy)  # type: ignore[misc]
        variable: Any = self
        resource_variable_ops.variable_accessed(variable)
        if not record.should_record_backprop([variable.handle]):
            return before
        value = tf.identity(before)
        # The tape of this replica has not seen the read.
        record.record_operation("ReadVariableOp", [value], [variable.handle], lambda gradient: [gradient])
        return value


@tf.autograph.experimental.do_not_convert
def _change(variable: Any, method: str, value: Any, alone: Callable[..., Any], *rest: Any) -> Any:
    if not is_one_of_several():
        return alone(value, *rest)
    value = tf.convert_to_tensor(value, variable.dtype)
    added = _added(variable, value) if method == "assign" else None
    aggregation = variable.aggregation
    if aggregation == _AGGREGATION.NONE:
        is_addition = method != "assign" or added is not None
        # What is added to a weight is a part of a gradient, of which only the program knows how parts are combined.
        if not variable.is_of_keras or (variable.trainable and is_addition):
            raise _not_aggregated(variable, method)
        if not variable.dtype.is_floating:
            alone(value, *rest)
            return variable
        aggregation = _AGGREGATION.MEAN

    def merged(strategy: tf.distribute.Strategy, values: Any, all_added: Any) -> Any:
        name, amounts = method, values
        if method == "assign":
            if None not in parts_of_replicas(all_added):
                name, amounts = "assign_add", all_added
            elif aggregation == _AGGREGATION.SUM and variable.is_of_keras:
                raise _no_addition(variable)
        amount = aggregated(amounts, aggregation)
        return strategy.extended.update(variable, lambda each: getattr(each, name)(amount, read_value=False))

    # An identity, since what is the same tensor in all replicas is not a value of each.
    tf.distribute.get_replica_context().merge_call(merged, args=(tf.identity(value), added))
    return variable


def _added(variable: Any, value: Any) -> Any | None:
    """Returns what an assignment adds to a variable; None if it is no addition."""
    change = change_of(variable, value)
    return None if change is None else tf.identity(change[1]) if change[0] else tf.negative(change[1])


def _no_addition(variable: Any) -> ValueError:
    return ValueError(
        f"A replica assigned a value to {variable.name!r} that is not its value plus something, so it cannot be said "
        "what the sum over the replicas is to be. Write it as variable.assign(variable + change)."
    )


def _not_aggregated(variable: Any, method: str) -> ValueError:
    return ValueError(
        f"Several replicas of a worker call {method} of the variable {variable.name!r}, which was created without an "
        "aggregation. Create it with aggregation=tf.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA, or change it "
        "outside of strategy.run, by what strategy.reduce returns."
    )


def _scatter_method(name: str) -> Callable[..., Any]:
    is_sum = name.endswith(("add", "sub"))

    def scatter(self: Any, *args: Any, **kwargs: Any) -> Any:
        stock = getattr(super(_Replicated, self), name)
        if not is_one_of_several() or (is_sum and self.aggregation == _AGGREGATION.SUM):
            return stock(*args, **kwargs)
        raise ValueError(
            f"Several replicas of a worker call {name} of the variable {self.name!r}. In a replica only additions to "
            "rows can be aggregated, of a variable with aggregation=tf.VariableAggregation.SUM; make other changes "
            "outside of strategy.run."
        )

    return scatter


def _add_scatters(names: Sequence[str]) -> None:
    for name in names:
        setattr(_Replicated, name, _scatter_method(name))


_add_scatters([*(f"scatter_{name}" for name in _SCATTERS), "batch_scatter_update"])
