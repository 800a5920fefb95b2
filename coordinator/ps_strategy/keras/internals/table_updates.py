"""Gradients of embedding tables go to the tables' own optimizers, after the model's optimizer has clipped them.

A table gives Keras a variable without values, whose gradients are `tf.IndexedSlices` with keys as indices. An optimizer
of Keras has no slots for it. What it does to all gradients of a step before it applies any, it does to the table's as
well: clipping, unscaling of the loss. Then `apply_gradients` of the table is called, where Keras would
change the variable; learning rate, weight decay and averages are those of the table's optimizer, or none.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from coordinator.ps_strategy.keras.internals.optimizers import clipped, without_repeats
from coordinator.ps_strategy.keras.internals.parts import variable_of, view_of
from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced
from coordinator.ps_strategy.tensorflow_internals.replica_threads import apply_once, is_one_of_several
from coordinator.ps_strategy.tensorflow_internals.table_variable import TableVariable

# The attribute of an optimizer that has the accumulated gradients of tables, by the id of their variable.
_ACCUMULATED = "_coordinator_accumulated"

_Apply = Callable[[Any, Sequence[Any], Sequence[Any]], None]


def is_table(variable: Any) -> bool:
    """Returns True for the variable of a table, or a Keras variable that has it."""
    return isinstance(variable_of(variable), TableVariable)


@contextlib.contextmanager
def table_updates() -> Iterator[None]:
    """A scope in which optimizers have no slots for tables, and give tables their gradients."""
    # Private: Keras calls the first with all gradients of a step, before it clips them. The second creates slots.
    base = keras.optimizers.Optimizer
    stock, stock_slot = base._backend_apply_gradients, base.add_variable_from_reference

    @functools.wraps(stock)
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        if self.gradient_accumulation_steps and is_one_of_several():
            raise ValueError(
                "An optimizer with gradient_accumulation_steps accumulates in each replica of a worker, which has one "
                "set of variables for all of its devices. Give it larger batches instead, or start workers with one "
                "device."
            )
        if not any(map(is_table, trainable_variables)):
            stock(self, grads, trainable_variables)
        else:
            _apply(stock, self, grads, trainable_variables)

    @functools.wraps(stock_slot)
    def add_slot(self: Any, reference_variable: Any, name: str | None = None, initializer: Any = "zeros") -> Any:
        if not is_table(reference_variable):
            return stock_slot(self, reference_variable, name=name, initializer=initializer)
        if name == "gradient_accumulator":
            variable = variable_of(reference_variable)
            vars(self).setdefault(_ACCUMULATED, {})[id(variable)] = variable.new_accumulated()
        return None

    # Private: where `use_ema` puts averages in place of variables, with those that are None.
    stock_overwrite = base._overwrite_model_variables_with_average_value

    @functools.wraps(stock_overwrite)
    def overwrite(self: Any, trainable_variables: Sequence[Any]) -> None:
        averages = self._model_variables_moving_average
        pairs = zip(trainable_variables, averages, strict=True)
        others = [each for each, average in pairs if average is not None]
        view = view_of(self, _model_variables_moving_average=[each for each in averages if each is not None])
        stock_overwrite(view, others)

    with contextlib.ExitStack() as stack:
        for name, function in (
            ("_backend_apply_gradients", apply),
            ("add_variable_from_reference", add_slot),
            ("_overwrite_model_variables_with_average_value", overwrite),
        ):
            stack.enter_context(attribute_replaced(base, name, function))
        stack.enter_context(_finite_rows())
        yield


@contextlib.contextmanager
def _finite_rows() -> Iterator[None]:
    """A scope in which a `LossScaleOptimizer` looks for what is not finite among the rows of a gradient alone."""
    # Private: Keras would make a dense tensor of it.
    kind = keras.optimizers.LossScaleOptimizer
    stock = kind.check_finite

    @functools.wraps(stock)
    def check_finite(self: Any, grads: Sequence[Any]) -> Any:
        return stock(self, [each.values if isinstance(each, tf.IndexedSlices) else each for each in grads])

    with attribute_replaced(kind, "check_finite", check_finite):
        yield


def _apply(stock: _Apply, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Has Keras apply the gradients that are not of tables, and adds the others where Keras clips."""
    pairs = list(zip(gradients, variables, strict=True))
    others = [(gradient, variable) for gradient, variable in pairs if not is_table(variable)]
    ours = [(gradient, variable) for gradient, variable in pairs if is_table(variable)]

    accumulated = vars(optimizer).get(_ACCUMULATED, {})

    # Keras calls this in the other steps.
    def accumulate(*given: Any) -> None:
        for gradient, variable in ours:
            accumulated[id(variable_of(variable))].add(gradient)
        optimizer._backend_increment_gradient_accumulators(*given)

    def mean(gradient: Any, variable: Any) -> Any:
        steps = optimizer.gradient_accumulation_steps
        if not steps:
            return gradient
        before = accumulated[id(variable_of(variable))].take()
        values = tf.concat([tf.cast(gradient.values, tf.float32), before.values], 0) / steps
        return tf.IndexedSlices(values, tf.concat([gradient.indices, before.indices], 0), before.dense_shape)

    def clip(gradients: Sequence[Any]) -> Sequence[Any]:
        rows = [without_repeats(mean(gradient, variable)) for gradient, variable in ours]
        found = clipped(optimizer, [*gradients, *rows], optimizer._clip_gradients)
        for gradient, (_, variable) in zip(found[len(gradients) :], ours, strict=True):
            apply_once(variable_of(variable).apply_gradients, gradient)
        return found[: len(gradients)]

    # Private, both: Keras calls them on the optimizer, one of them in a step.
    view = view_of(optimizer, _clip_gradients=clip, _backend_increment_gradient_accumulators=accumulate)
    stock(view, [gradient for gradient, _ in others], [variable for _, variable in others])
