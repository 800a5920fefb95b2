"""Keras 3's optimizers: placement of their variables, their learning rate, and updates of some variables only.

Each part of a sharded variable is updated like a variable, with the same part of each slot:

    variable   part_0  part_1        on server 0: update_step(gradient of part_0, part_0)  with part_0 of each slot
    slot       part_0  part_1        on server 1: update_step(gradient of part_1, part_1)  with part_1 of each slot

If an optimizer changes each row independently, updating all parts has the same result as updating the whole variable.
Other optimizers get the whole variable.
"""

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf


def _operator(function: Callable[[Any, Any], Any]) -> Any:
    return lambda stand_in, other: function(stand_in.value, other)


def _reflected(function: Callable[[Any, Any], Any]) -> Any:
    return lambda stand_in, other: function(other, stand_in.value)


class StandIn:
    """A value in place of a variable. An update may set the value for itself; the variable stays unchanged."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.dtype: str = value.dtype.name

    @property
    def value(self) -> Any:
        return self._value

    def assign(self, value: Any) -> None:
        self._value = value

    def assign_add(self, value: Any) -> None:
        """Does nothing: an update adds only to the count of updates, and the caller counts the update itself."""

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        return self.value if dtype is None else tf.cast(self.value, dtype)

    __add__, __radd__ = _operator(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _operator(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _operator(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _operator(operator.truediv), _reflected(operator.truediv)
    __pow__, __mod__ = _operator(operator.pow), _operator(operator.mod)

    def __neg__(self) -> Any:
        return -self.value


class LocalCopy(StandIn):
    """A copy of a variable's value that an update changes for itself, because other code changes the variable."""

    def assign_add(self, value: Any) -> None:
        """Adds to the value for the rest of the update."""
        self.assign(self.value + value)

    def assign_sub(self, value: Any) -> None:
        """Subtracts from the value for the rest of the update."""
        self.assign(self.value - value)


class Rows(StandIn):
    """Some rows of a variable. A change of this object changes the rows of the variable, on the variable's server.

    Additions, subtractions and `assign(rows + x)` use the variable's `scatter_add` and `scatter_sub`, so that no change
    is lost if other workers change the same rows. Rows are read once, when they are first needed.

    `indices` has each row once, int32 or int64 [n].
    """

    def __init__(self, variable: tf.Variable, indices: Any) -> None:
        super().__init__(variable)
        self.variable = variable
        self._indices = indices
        self._value = None
        self.shape = tf.TensorShape(indices.shape[:1]).concatenate(variable.shape[1:])

    @property
    def value(self) -> Any:
        """The rows with the changes that this update has made so far, [n, ...]."""
        if self._value is None:
            self._value = self.variable.sparse_read(self._indices)
        return self._value

    def assign(self, value: Any) -> None:
        added = self._added(value)
        if added is None:
            self.variable.scatter_update(self._slices(value))
        else:
            self.variable.scatter_add(self._slices(added))
        self._value = value

    def assign_add(self, value: Any) -> None:
        self.variable.scatter_add(self._slices(value))
        if self._value is not None:
            self._value = self._value + value

    def assign_sub(self, value: Any) -> None:
        self.variable.scatter_sub(self._slices(value))
        if self._value is not None:
            self._value = self._value - value

    def _slices(self, value: Any) -> tf.IndexedSlices:
        return tf.IndexedSlices(value, self._indices)

    def _added(self, value: Any) -> Any | None:
        """Returns the amount that was added to the rows to get this value; None if the value is no such sum."""
        if not tf.is_symbolic_tensor(value) or value.op.type not in ("Add", "AddV2"):
            return None
        left, right = value.op.inputs
        return right if left is self._value else left if right is self._value else None


class UnsharedRows(LocalCopy, Rows):
    """Rows that only this update changes. The rows are read once; the caller writes changed rows at the end."""

    def __init__(self, variable: tf.Variable, indices: Any) -> None:
        super().__init__(variable, indices)
        self.is_changed = False

    def assign(self, value: Any) -> None:
        """Sets the rows that the caller writes."""
        value = tf.convert_to_tensor(value, self.variable.dtype)
        self._value = tf.broadcast_to(value, tf.shape(self.value)) if value.shape.rank == 0 else value
        self.is_changed = True


def variable_of(variable: Any) -> Any:
    """Returns the TensorFlow variable of a `tf.Variable` or `keras.Variable`."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def parts_of(variable: Any) -> Sequence[Any]:
    """Returns the parts of a sharded variable; any other `tf.Variable` or `keras.Variable` is its only part."""
    return getattr(variable_of(variable), "parts", (variable,))


def gradients_of_parts(gradient: Any, variable: Any) -> Sequence[Any]:
    """Returns each part's rows of a gradient, by `parts_of(variable)`: a tensor, `tf.IndexedSlices` or None."""
    parts = parts_of(variable)
    if len(parts) == 1 or gradient is None:
        return [gradient] * len(parts)
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.split(gradient, [part.shape[0] for part in parts])
    # `dense_shape` is needed where a gradient is made dense.
    return [
        tf.IndexedSlices(rows.values, rows.indices, tf.constant(part.shape.as_list(), rows.indices.dtype))
        for rows, part in zip(variable_of(variable).split_rows(gradient), parts, strict=True)
    ]


def with_parts(optimizer: Any) -> Any:
    """Returns a view of a built optimizer as if it had been built with the parts of its sharded variables.

    A variable is not divided if its slots have other parts than the variable, or only one part.
    """
    view = view_of(optimizer)
    # Private, here and below: an optimizer's slots are lists, in the order of the variables at its `build`.
    variables = optimizer._trainable_variables
    if all(len(parts_of(variable)) == 1 for variable in variables):
        return view
    lists = slot_lists(optimizer)
    divided = [
        _is_divided(variable, [slots[number] for slots in lists.values()]) for number, variable in enumerate(variables)
    ]
    for name, slots in lists.items():
        view.__dict__[name] = [
            part
            for slot, variable, is_divided in zip(slots, variables, divided, strict=True)
            for part in (_slots_of_parts(slot, variable) if is_divided else [slot])
        ]
    # The weight decay of a variable depends on the name of the whole variable.
    decays = {
        optimizer._var_key(part): optimizer._use_weight_decay(variable)
        for variable, is_divided in zip(variables, divided, strict=True)
        for part in (parts_of(variable) if is_divided else [variable])
    }
    view.__dict__["_trainable_variables_indices"] = {key: number for number, key in enumerate(decays)}
    view.__dict__["_use_weight_decay"] = lambda part: decays[optimizer._var_key(part)]
    return view


def view_of(optimizer: Any, kind: Any = None, **attributes: Any) -> Any:
    """Returns a view: an optimizer that shares the attributes of another optimizer, which is not changed.

    `kind` is the class of the view, by default the optimizer's class. Only the view has `attributes`.
    """
    # `copy.copy` would serialize and deserialize the optimizer.
    view = object.__new__(kind or type(optimizer))
    view.__dict__.update(vars(optimizer), **attributes)
    return view


def slot_lists(optimizer: Any) -> dict[str, list[Any]]:
    """Returns a built optimizer's lists with an item for each variable, by attribute; the list of variables, too."""
    # `_trainable_variables` is not counted, because it may be shorter in the view for one server.
    count = len(optimizer._trainable_variables_indices)
    # `_variables` has all of the optimizer's own variables in one list.
    return {
        name: slots
        for name, slots in vars(optimizer).items()
        if isinstance(slots, list) and len(slots) == count and name != "_variables"
    }


def _is_divided(variable: Any, slots: Sequence[Any]) -> bool:
    """Returns True if a variable and its slots that have rows have the same parts."""
    count = len(parts_of(variable))
    return count > 1 and all(len(parts_of(slot)) == count for slot in slots if _has_rows(slot, variable))


def _has_rows(slot: Any, variable: Any) -> bool:
    return isinstance(slot, (keras.Variable, tf.Variable)) and slot.shape[:1] == variable.shape[:1]


def _slots_of_parts(slot: Any, variable: Any) -> list[Any]:
    if _has_rows(slot, variable):
        return list(parts_of(slot))
    others = len(parts_of(variable)) - 1
    if not isinstance(slot, (keras.Variable, tf.Variable)):
        return [slot] * (1 + others)
    # A slot without rows, such as a count of the variable's updates, is changed once.
    return [slot, *(LocalCopy(tf.identity(variable_of(slot))) for _ in range(others))]


def is_optimizer(value: Any) -> bool:
    return isinstance(value, keras.optimizers.Optimizer)


def build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Creates the variables of an optimizer, with each slot on the server of its model variable."""
    optimizer.build(_Colocating(variables))


class _Colocating(list[Any]):
    """A list of variables. A variable that is created during an iteration is placed with the current variable.

    Keras has no other hook: most optimizers place their slots with the variable, but Adafactor does not.
    """

    def __iter__(self) -> Iterator[Any]:
        for variable in super().__iter__():
            with tf.distribute.get_strategy().extended.colocate_vars_with(variable_of(variable)):
                yield variable


def has_strayed_slots(optimizer: Any) -> bool:
    """Returns True if a built optimizer has a slot on another device than its variable."""
    # Private: `_trainable_variables` has the variables at the optimizer's `build`, in the order of the slots.
    variables = optimizer._trainable_variables
    return any(
        isinstance(slot, keras.Variable) and _devices(slot) != _devices(variable)[: len(parts_of(slot))]
        for slots in slot_lists(optimizer).values()
        for slot, variable in zip(slots, variables, strict=True)
    )


def _devices(variable: Any) -> list[str]:
    return [variable_of(part).device for part in parts_of(variable)]


def scalar_variables(optimizer: Any) -> list[tf.Variable]:
    """Returns the TensorFlow variables of the count of updates and, if it is a variable, the learning rate."""
    # Private: `optimizer.learning_rate` returns the value, not the variable.
    rate = optimizer._learning_rate
    return [optimizer._iterations.value, *([rate.value] if isinstance(rate, keras.Variable) else [])]


def learning_rate(optimizer: Any, scalars: Sequence[Any]) -> Any:
    """Returns the learning rate for given values of `scalar_variables`, a float32 scalar."""
    # Private: `optimizer.learning_rate` would read the variables on their servers.
    rate = optimizer._learning_rate
    if isinstance(rate, keras.Variable):
        return tf.cast(scalars[1], tf.float32)
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return tf.cast(rate(scalars[0]), tf.float32)
    return tf.cast(rate() if callable(rate) else rate, tf.float32)


def exempt_from_weight_decay(optimizer: Any, variables: Sequence[Any]) -> list[int]:
    """Returns the positions of the variables that an optimizer excludes from weight decay."""
    # Private: the config lacks the arguments of `exclude_from_weight_decay`.
    view = with_parts(optimizer)
    return [number for number, variable in enumerate(variables) if not view._use_weight_decay(variable)]


def without_repeats(gradient: Any) -> Any:
    """Sums rows of the same index, if the gradient is `tf.IndexedSlices`; returns other gradients unchanged."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices = gradient.indices
    # The result of `tf.unique` has no repeats; a table's look-up gives such indices.
    if tf.is_symbolic_tensor(indices) and indices.op.type == "Unique" and indices is indices.op.outputs[0]:
        return gradient
    indices, positions = tf.unique(indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def clipped_by_global_norm(gradients: Sequence[Any], greatest: Any) -> Sequence[Any]:
    """Clips gradients by their global norm; `tf.IndexedSlices` stay sparse, and must have each index once."""
    norm = tf.linalg.global_norm([tf.cast(gradient, tf.float32) for gradient in gradients])
    return tf.clip_by_global_norm(gradients, greatest, norm)[0]


def clipped(optimizer: Any, gradients: Sequence[Any], clip: Callable[[Sequence[Any]], Sequence[Any]]) -> Sequence[Any]:
    """Clips gradients by an optimizer's settings. `clip` is the optimizer's own method to clip gradients.

    `tf.IndexedSlices` stay sparse, and must have each index once.
    """
    greatest = optimizer.global_clipnorm
    # As in Keras, `clipnorm` takes precedence over `global_clipnorm`.
    if optimizer.clipnorm or not greatest:
        return clip(gradients)
    return clipped_by_global_norm(gradients, greatest)


def view_for_variables(optimizer: Any, variables: Sequence[Any], scalars: Sequence[Any], rate: Any) -> Any:
    """Returns a view of a built optimizer for one update of variables, or parts of variables, of one server.

    The view's `apply` uses the given learning rate and count of updates (`scalars`, see `scalar_variables`), and does
    not count the update. Sparse gradients must have each index once.
    """
    view = with_parts(optimizer)
    # Private: all users of the optimizer share its learning rate and count of updates, and one list has the moving
    # averages of all variables.
    view.__dict__.update(
        _learning_rate=rate,
        _iterations=StandIn(scalars[0]),
        global_clipnorm=None,
        # `row_updates` reads this attribute.
        has_unique_rows=True,
    )
    if optimizer.use_ema:
        # Variables without a gradient are averaged as well.
        device = variable_of(variables[0]).device
        is_near = [variable_of(variable).device == device for variable in view._trainable_variables]
        for name in ("_trainable_variables", "_model_variables_moving_average"):
            view.__dict__[name] = list(itertools.compress(getattr(view, name), is_near))
    if isinstance(optimizer, keras.optimizers.Nadam):
        # Private: the product of all momenta is one variable, which every server would multiply.
        view.__dict__["_u_product"] = StandIn(product_of_momenta(optimizer.beta_1, scalars[0]))
    return view


def product_of_momenta(beta: float, updates: Any) -> Any:
    """Returns the product of Nadam's momenta after `updates` updates, a float32 scalar (Dozat 2016, section 3)."""
    # In float32, all later momenta equal beta.
    factors = 1.0 - 0.5 * 0.96 ** tf.range(1.0, 513.0)
    factors = tf.where(tf.range(512, dtype=updates.dtype) < updates, factors, 1.0)
    return tf.reduce_prod(factors) * beta ** tf.cast(updates, tf.float32)
