"""Updates on the parameter servers: of single rows by sparse gradients, and of sharded variables part by part.

An optimizer of Keras 3 computes most of its updates for the whole variable, whatever rows a gradient has. Here Keras'
own `update_step` is called with the rows that the gradient has, of the variable and of each slot, so that a step costs
the same however many rows there are. It runs on the variable's server; slots are not sent anywhere.

It promises that rows change as if Keras had been given the gradient as a dense tensor, if every step has them all. Rows
that a step does not have, stay, with their slots: no moment decays, and no weight (as LazyAdam, DeepRec and TorchRec).
"""

import contextlib
import functools
import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from coordinator.ps_strategy.keras.internals.optimizers import (
    clipped,
    without_repeats,
)
from coordinator.ps_strategy.keras.internals.parts import (
    gradients_of_parts,
    parts_of,
    slot_lists,
    variable_of,
    view_of,
    with_parts,
)
from coordinator.ps_strategy.keras.internals.stand_ins import Rows
from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced

_logger = logging.getLogger("coordinator")

_ELEMENTWISE = {
    getattr(keras.optimizers, name).update_step
    for name in ("SGD", "Adagrad", "Adadelta", "Adam", "Adamax", "Nadam", "RMSprop", "Ftrl", "Lion")
}


def updates_rows(optimizer: Any) -> bool:
    """Returns True if what an optimizer does to a row depends on this row of the gradient, slots and variable alone.

    This is known of Keras' elementwise optimizers, and said by others with an attribute `updates_rows = True`.
    """
    # A subclass may use an inherited `update_step`, or replace it.
    return bool(getattr(optimizer, "updates_rows", type(optimizer).update_step in _ELEMENTWISE))


@contextlib.contextmanager
def row_updates(*, by_rows: bool = True) -> Iterator[None]:
    """A scope in which optimizers change the rows alone of variables on parameter servers, and sharded ones by parts.

    `gradient_accumulation_steps`, and optimizers of which `updates_rows` is not known, are left to Keras; the log says
    so once for each kind.

    Args:
      by_rows: False leaves sparse gradients to Keras.
    """
    # Private: Keras calls it with all gradients of a step, before it clips them; no public hook comes before it.
    base, name = keras.optimizers.Optimizer, "_backend_apply_gradients"
    stock = getattr(base, name)
    if list(inspect.signature(stock).parameters) != ["self", "grads", "trainable_variables"]:
        _logger.warning("Sparse gradients change whole variables: this Keras (%s) is not known.", keras.__version__)
        yield
        return
    said: set[str] = set()

    @functools.wraps(stock)
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        sparse = [
            variable
            for gradient, variable in zip(grads, trainable_variables, strict=True)
            if by_rows and isinstance(gradient, tf.IndexedSlices) and _is_on_server(variable)
        ]
        if not isinstance(self, _ByRows):
            if sparse and _may_update_rows(self, sparse, said):
                if not getattr(self, "has_unique_rows", False):
                    grads = [without_repeats(gradient) for gradient in grads]
                self = _by_rows(self, sparse)
            elif _may_update_parts(self, trainable_variables):
                self = _by_rows(self, [])
        stock(self, grads, trainable_variables)

    with attribute_replaced(base, name, apply):
        yield


def _is_on_server(variable: Any) -> bool:
    return tf.DeviceSpec.from_string(variable_of(variable).device).job == "ps"


def _may_update_rows(optimizer: Any, variables: Sequence[Any], said: set[str]) -> bool:
    """Returns whether an optimizer is given rows alone; says in the log once if it, or a part of it, is not."""
    kind = type(optimizer).__name__
    is_by_rows = False
    if optimizer.gradient_accumulation_steps:
        kind += " with gradient_accumulation_steps"
    elif updates_rows(optimizer):
        is_by_rows = True
        if not optimizer.use_ema:
            return True
        kind += ", for the averages of use_ema,"
    if kind not in said:
        said.add(kind)
        _logger.warning(
            "%s computes with whole variables: a step costs as much as all rows of %s, although its gradient is "
            "sparse. See docs/embeddings.md.",
            kind,
            variable_of(variables[0]).name,
        )
    return is_by_rows


def _may_update_parts(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Returns whether an optimizer is given the parts of its sharded variables, if there are any."""
    is_sharded = any(len(parts_of(variable)) > 1 for variable in variables)
    return is_sharded and not optimizer.gradient_accumulation_steps and updates_rows(optimizer)


def _by_rows(optimizer: Any, variables: Sequence[Any]) -> Any:
    """Returns a view of an optimizer that changes single rows of these variables, and sharded ones by parts."""
    kind: Any = type(optimizer)
    changed = [each for variable in variables for each in (variable, *parts_of(variable))]
    by_rows = frozenset(id(variable_of(each)) for each in changed)
    return view_of(with_parts(optimizer), _by_rows_class(kind), by_rows=by_rows)


@functools.cache
def _by_rows_class(kind: Any) -> Any:
    return type(f"ByRows{kind.__name__}", (_ByRows, kind), {"__module__": __name__})


class _ByRows:
    """A mixin for classes of optimizers: `tf.IndexedSlices` without repeated indices change single rows.

    Sharded variables are clipped as a whole, and changed part by part.

    Attributes:
      by_rows: the ids of the variables with such gradients, and of their parts.
    """

    by_rows: frozenset[int]

    # Private: all but `update_step`, which Keras documents for those who write optimizers.

    def _clip_gradients(self: Any, gradients: Sequence[Any]) -> Sequence[Any]:
        clip = super()._clip_gradients  # type: ignore[misc]  # of the other base
        return clipped(self, gradients, clip) if self.by_rows else clip(gradients)

    def _apply_weight_decay(self: Any, variables: Sequence[Any]) -> None:
        dense = [each for each in variables if id(variable_of(each)) not in self.by_rows]
        parts = [part for each in dense for part in self._parts_of(each)]
        super()._apply_weight_decay(parts)  # type: ignore[misc]  # of the other base

    def _backend_update_step(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any], rate: Any) -> None:
        parts: list[Any] = []
        of_parts: list[Any] = []
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            mine = self._parts_of(variable)
            parts += mine
            of_parts += gradients_of_parts(gradient, variable) if len(mine) > 1 else [gradient]
        super()._backend_update_step(of_parts, parts, rate)  # type: ignore[misc]  # of the other base

    def _parts_of(self: Any, variable: Any) -> Sequence[Any]:
        """Returns the parts that the optimizer has slots of, or the variable itself."""
        is_whole = self._var_key(variable) in self._trainable_variables_indices
        return [variable] if is_whole else parts_of(variable)

    def update_step(self: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if id(variable) not in self.by_rows:
            super().update_step(gradient, variable, learning_rate)  # type: ignore[misc]  # of the other base
            return
        rows = Rows(variable, gradient.indices)
        if self.weight_decay is not None and self._use_weight_decay(variable):
            decay, rate = (tf.cast(each, variable.dtype) for each in (self.weight_decay, learning_rate))
            rows.assign_sub(rows.value * decay * rate)
        _with_slots_of(self, variable, gradient.indices).update_step(gradient.values, rows, learning_rate)


def _with_slots_of(optimizer: Any, variable: Any, indices: Any) -> Any:
    """Returns a view of an optimizer that has the given rows in place of this variable, and of its slots."""
    number = optimizer._get_variable_index(variable)
    # The class that `_by_rows_class` was given. The attribute is private, as `_var_key` above.
    view = view_of(optimizer, type(optimizer).__mro__[2], _get_variable_index=lambda _: number)
    for name, slots in slot_lists(optimizer).items():
        slot = variable_of(slots[number])
        # One that has no rows, such as a count of the variable's updates, is used as it is.
        if name not in _NO_SLOTS and isinstance(slot, tf.Variable) and slot.shape[:1] == variable.shape[:1]:
            view.__dict__[name] = [*slots[:number], Rows(slot, indices), *slots[number + 1 :]]
    return view


_NO_SLOTS = ("_trainable_variables", "_model_variables_moving_average")
