"""Updates single rows by sparse gradients, sharded variables part by part, and embedding tables.

An optimizer of Keras 3 computes most of its updates for the whole variable, even if a gradient has few rows. Here
Keras' own `update_step` gets only the gradient's rows of the variable and of each slot, so that the cost of a step does
not depend on the number of rows of the variable. `update_step` runs on the variable's server; slots are not sent.

Guarantee: if the gradient of every step has all rows, rows change as with a dense gradient. A row that a gradient does
not have stays unchanged, as do its slots: neither moments nor weights decay (as in LazyAdam, DeepRec and TorchRec).

An embedding table gives Keras a variable without values, whose gradients are `tf.IndexedSlices` with keys as indices.
An optimizer of Keras has no slots for this variable. Clipping and the unscaling of the loss treat the table's gradient
like other gradients. Then the table's `apply_gradients` is called, where Keras would change the variable. The table's
optimizer determines the learning rate, weight decay and averages.
"""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.keras.internals.optimizers import (
    Rows,
    StandIn,
    clipped,
    gradients_of_parts,
    learning_rate,
    parts_of,
    product_of_momenta,
    slot_lists,
    variable_of,
    view_for_variables,
    view_of,
    with_parts,
    without_repeats,
)
from coordinator.ps_strategy.tensorflow_internals.handles import is_on_parameter_server
from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced
from coordinator.ps_strategy.tensorflow_internals.replicas import apply_once, is_one_of_several
from coordinator.ps_strategy.tensorflow_internals.unstored_variable import TableVariable

_logger = logging.getLogger("coordinator")

_ELEMENTWISE = {
    getattr(keras.optimizers, name).update_step
    for name in ("SGD", "Adagrad", "Adadelta", "Adam", "Adamax", "Nadam", "RMSprop", "Ftrl", "Lion")
}


def updates_rows(optimizer: Any) -> bool:
    """Returns True if an optimizer's change of a row depends only on this row of the gradient, slots and variable.

    Keras' elementwise optimizers are known to do so. Other optimizers declare it by an attribute `updates_rows = True`.
    """
    # Methods are compared, not classes: a subclass may inherit `update_step`, or replace it.
    return bool(getattr(optimizer, "updates_rows", type(optimizer).update_step in _ELEMENTWISE))


@contextlib.contextmanager
def row_updates(*, by_rows: bool = True) -> Iterator[None]:
    """A scope in which optimizers change single rows of variables on parameter servers, and sharded variables by parts.

    Keras itself runs optimizers with `gradient_accumulation_steps`, and optimizers that do not update rows; the log
    says so once for each kind. `by_rows=False` leaves sparse gradients to Keras.
    """
    # Private: Keras calls this method with all gradients of a step, before it clips them. Public hooks come later.
    base, name = keras.optimizers.Optimizer, "_backend_apply_gradients"
    stock = getattr(base, name)
    if list(inspect.signature(stock).parameters) != ["self", "grads", "trainable_variables"]:
        _logger.warning("Sparse gradients change whole variables: this Keras (%s) is not known.", keras.__version__)
        yield
        return
    said: set[str] = set()

    def is_by_rows(gradient: Any, variable: Any) -> bool:
        is_sparse = by_rows and isinstance(gradient, tf.IndexedSlices)
        return is_sparse and is_on_parameter_server(variable_of(variable).device)

    @functools.wraps(stock)
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        pairs = zip(grads, trainable_variables, strict=True)
        sparse = [variable for gradient, variable in pairs if is_by_rows(gradient, variable)]
        is_sharded = any(len(parts_of(variable)) > 1 for variable in trainable_variables)
        if not isinstance(self, _ByRows):
            if sparse and _may_update_rows(self, sparse, said):
                if not getattr(self, "has_unique_rows", False):
                    grads = [without_repeats(gradient) for gradient in grads]
                self = _by_rows(self, sparse)
            elif is_sharded and not self.gradient_accumulation_steps and updates_rows(self):
                self = _by_rows(self, [])
        stock(self, grads, trainable_variables)

    with attribute_replaced(base, name, apply):
        yield


def _may_update_rows(optimizer: Any, variables: Sequence[Any], said: set[str]) -> bool:
    """Returns whether an optimizer gets only rows; logs once if some of its computations need whole variables."""
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


def _by_rows(optimizer: Any, variables: Sequence[Any]) -> Any:
    """Returns a view of an optimizer that changes single rows of these variables, and sharded variables by parts."""
    kind: Any = type(optimizer)
    by_rows = frozenset(id(variable_of(part)) for variable in variables for part in (variable, *parts_of(variable)))
    return view_of(with_parts(optimizer), _by_rows_class(kind), by_rows=by_rows)


@functools.cache
def _by_rows_class(kind: Any) -> Any:
    return type(f"ByRows{kind.__name__}", (_ByRows, kind), {"__module__": __name__})


class _ByRows:
    """A mixin for classes of optimizers: `tf.IndexedSlices` without repeated indices change single rows.

    Sharded variables are clipped as a whole, and changed part by part. `by_rows` has the ids of the variables with
    sparse gradients, and of the parts of these variables.
    """

    by_rows: frozenset[int]

    # Private: all methods but `update_step`, which Keras documents for authors of optimizers.

    def _clip_gradients(self: Any, gradients: Sequence[Any]) -> Sequence[Any]:
        clip = super()._clip_gradients  # type: ignore[misc]  # of the other base
        return clipped(self, gradients, clip) if self.by_rows else clip(gradients)

    def _apply_weight_decay(self: Any, variables: Sequence[Any]) -> None:
        dense = [variable for variable in variables if id(variable_of(variable)) not in self.by_rows]
        parts = [part for variable in dense for part in self._parts_of(variable)]
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
        """Returns the variable's parts if the optimizer has slots for them, else the variable itself."""
        is_whole = self._var_key(variable) in self._trainable_variables_indices
        return [variable] if is_whole else parts_of(variable)

    def update_step(self: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if id(variable) not in self.by_rows:
            super().update_step(gradient, variable, learning_rate)  # type: ignore[misc]  # of the other base
            return
        rows = Rows(variable, gradient.indices)
        if self.weight_decay is not None and self._use_weight_decay(variable):
            decay, rate = (tf.cast(factor, variable.dtype) for factor in (self.weight_decay, learning_rate))
            rows.assign_sub(rows.value * decay * rate)
        _with_slots_of(self, variable, gradient.indices).update_step(gradient.values, rows, learning_rate)


def _with_slots_of(optimizer: Any, variable: Any, indices: Any) -> Any:
    """Returns a view of an optimizer in which the slots of this variable are replaced by some of their rows."""
    number = optimizer._get_variable_index(variable)
    # The view has the class that was given to `_by_rows_class`. Like `_var_key`, `_get_variable_index` is private.
    view = view_of(optimizer, type(optimizer).__mro__[2], _get_variable_index=lambda _: number)
    for name, slots in slot_lists(optimizer).items():
        slot = variable_of(slots[number])
        # A slot without rows, such as a count of the variable's updates, stays in the view.
        if name not in _NO_SLOTS and isinstance(slot, tf.Variable) and slot.shape[:1] == variable.shape[:1]:
            view.__dict__[name] = [*slots[:number], Rows(slot, indices), *slots[number + 1 :]]
    return view


# The items of `slot_lists` that are no slots.
_NO_SLOTS = ("_trainable_variables", "_model_variables_moving_average")


class RowOptimizer:
    """Updates given rows and their slots by an elementwise optimizer of Keras 3, or one with `updates_rows = True`.

    A `RowOptimizer` builds a copy of the optimizer for a variable with one row, to find the slots. `update` changes
    rows as `row_updates` changes the rows of a variable.

    Args:
      optimizer: a `keras.optimizers.Optimizer`, which is copied: later changes of this object have no effect.
      dim: the length of a row.

    Raises:
      ValueError: the optimizer computes with whole variables, accumulates gradients, averages, or scales the loss.

    Attributes:
      slots: the initial values of a new row's slots, by name; arrays of the shape of a row, or scalars.
      learning_rate: the initial learning rate; None if it is a schedule or a function.
    """

    def __init__(self, optimizer: Any, dim: int) -> None:
        _check(optimizer)
        # Private: the config would serialize a schedule or function, which is not always possible.
        rate = optimizer._learning_rate
        is_number = isinstance(rate, keras.Variable)
        config = {**optimizer.get_config(), "learning_rate": float(rate.numpy()) if is_number else rate}
        self._optimizer = type(optimizer).from_config(config)
        self._row = keras.Variable(np.zeros([1, dim], np.float32), name="row")
        self._optimizer.build([self._row])
        self.learning_rate: float | None = config["learning_rate"] if is_number else None
        self.slots: dict[str, np.ndarray] = {
            name: np.asarray(variable_of(slot).numpy())[0]
            for name, [slot] in slot_lists(self._optimizer).items()
            if name not in _NO_SLOTS and isinstance(slot, keras.Variable) and slot.shape[:1] == (1,)
        }

    def clipped(self, gradient: Any) -> Any:
        """Clips a gradient by the optimizer's options. The worker calls this, because norms are of all rows."""
        # Private: Keras clips inside of its `apply`.
        return self._optimizer._clip_gradients([gradient])[0]

    def rate_at(self, step: Any) -> Any:
        """Returns the learning rate of a schedule or function at a step, a float32 scalar."""
        return learning_rate(self._optimizer, [step])

    def update(self, rows: Rows, slots: Mapping[str, Rows], gradient: Any, step: Any, rate: Any) -> None:
        """Updates rows of a table and their slots with their gradient, a float tensor of the shape of the rows.

        `step` is the number of earlier updates, an int64 scalar. `rate` is the learning rate, a float32 scalar.
        """
        view = view_for_variables(self._optimizer, [self._row], [step], rate)
        view.__dict__.update({name: [slot] for name, slot in slots.items()}, _get_variable_index=lambda _: 0)
        if isinstance(view, keras.optimizers.Nadam):
            # Private: Keras multiplies `_u_product` once for all variables, before their updates.
            view.__dict__["_u_product"] = StandIn(product_of_momenta(view.beta_1, step + 1))
        if view.weight_decay is not None:
            rows.assign_sub(rows.value * view.weight_decay * rate)
        view.update_step(gradient, rows, rate)

    def __repr__(self) -> str:
        return f"<RowOptimizer {type(self._optimizer).__name__}>"


def _check(optimizer: Any) -> None:
    kind = type(optimizer).__name__
    if hasattr(optimizer, "inner_optimizer") or hasattr(optimizer, "optimizers"):
        raise ValueError(f"A table takes an optimizer for its rows alone, not a {kind}: give it one of its parts.")
    if not updates_rows(optimizer):
        raise ValueError(
            f"{kind} computes with whole variables, and a table has none. Use an elementwise optimizer of Keras, such "
            "as Adagrad or Adam, RowwiseAdagrad, or a function (rows, gradient)."
        )
    for option in ("gradient_accumulation_steps", "use_ema", "loss_scale_factor"):
        if getattr(optimizer, option):
            raise ValueError(f"The optimizer of a table cannot have {option}. Leave it out.")


# The name of an optimizer's attribute that has the accumulated gradients of tables, by the id of a table's variable.
_ACCUMULATED = "_coordinator_accumulated"


def is_table(variable: Any) -> bool:
    """Returns True for the TensorFlow variable of a table, and for a Keras variable that wraps such a variable."""
    return isinstance(variable_of(variable), TableVariable)


@contextlib.contextmanager
def table_updates() -> Iterator[None]:
    """A scope in which optimizers have no slots for tables, and give tables their gradients."""
    base, scaling = keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer
    stock, stock_slot = base._backend_apply_gradients, base.add_variable_from_reference
    stock_overwrite, stock_check = base._overwrite_model_variables_with_average_value, scaling.check_finite

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

    @functools.wraps(stock_overwrite)
    def overwrite(self: Any, trainable_variables: Sequence[Any]) -> None:
        averages = self._model_variables_moving_average
        pairs = zip(trainable_variables, averages, strict=True)
        averaged = [variable for variable, average in pairs if average is not None]
        averages = [average for average in averages if average is not None]
        stock_overwrite(view_of(self, _model_variables_moving_average=averages), averaged)

    @functools.wraps(stock_check)
    def check_finite(self: Any, grads: Sequence[Any]) -> Any:
        # Keras would convert a sparse gradient to a dense tensor, so Keras gets only the rows.
        return stock_check(self, [grad.values if isinstance(grad, tf.IndexedSlices) else grad for grad in grads])

    with (
        # Private: Keras calls this method with all gradients of a step, before it clips them.
        attribute_replaced(base, "_backend_apply_gradients", apply),
        # Private: this method creates slots.
        attribute_replaced(base, "add_variable_from_reference", add_slot),
        # Private: with `use_ema`, this method replaces variables by their averages, even if an average is None.
        attribute_replaced(base, "_overwrite_model_variables_with_average_value", overwrite),
        # Private: a `LossScaleOptimizer` calls this method to find gradients that are not finite.
        attribute_replaced(scaling, "check_finite", check_finite),
    ):
        yield


def _apply(stock: Callable[..., None], optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Has Keras apply the gradients of other variables; applies the gradients of tables when Keras clips gradients."""
    pairs = list(zip(gradients, variables, strict=True))
    others = [pair for pair in pairs if not is_table(pair[1])]
    tables = [(gradient, variable_of(variable)) for gradient, variable in pairs if is_table(variable)]
    accumulated = vars(optimizer).get(_ACCUMULATED, {})

    # Keras calls `accumulate` in steps that apply nothing.
    def accumulate(*arguments: Any) -> None:
        for gradient, table in tables:
            accumulated[id(table)].add(gradient)
        optimizer._backend_increment_gradient_accumulators(*arguments)

    def mean(gradient: Any, table: Any) -> Any:
        steps = optimizer.gradient_accumulation_steps
        if not steps:
            return gradient
        before = accumulated[id(table)].take()
        values = tf.concat([tf.cast(gradient.values, tf.float32), before.values], 0) / steps
        return tf.IndexedSlices(values, tf.concat([gradient.indices, before.indices], 0), before.dense_shape)

    def clip(gradients: Sequence[Any]) -> Sequence[Any]:
        rows = [without_repeats(mean(gradient, table)) for gradient, table in tables]
        all_clipped = clipped(optimizer, [*gradients, *rows], optimizer._clip_gradients)
        for gradient, (_, table) in zip(all_clipped[len(gradients) :], tables, strict=True):
            apply_once(table.apply_gradients, gradient)
        return all_clipped[: len(gradients)]

    # Private: Keras calls one of these two methods of the optimizer in each step.
    view = view_of(optimizer, _clip_gradients=clip, _backend_increment_gradient_accumulators=accumulate)
    stock(view, [gradient for gradient, _ in others], [variable for _, variable in others])
