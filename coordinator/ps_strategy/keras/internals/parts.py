"""Sharded variables in optimizers of Keras 3: each part is updated like a variable, with its parts of the slots.

    variable   part_0  part_1        on server 0: update_step(gradient of part_0, part_0)  with part_0 of each slot
    slot       part_0  part_1        on server 1: update_step(gradient of part_1, part_1)  with part_1 of each slot

An optimizer that changes each row by itself does the same to all parts as to the whole variable. Others are given the
whole variable.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from coordinator.ps_strategy.keras.internals.stand_ins import LocalCopy


def variable_of(variable: Any) -> Any:
    """Returns the TensorFlow variable of a `tf.Variable` or `keras.Variable`."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def parts_of(variable: Any) -> Sequence[Any]:
    """Returns the parts of a sharded variable; any other `tf.Variable` or `keras.Variable` is its only part."""
    return getattr(variable_of(variable), "parts", (variable,))


def gradients_of_parts(gradient: Any, variable: Any) -> Sequence[Any]:
    """Returns for each of `parts_of(variable)` its rows of a gradient: a tensor, `tf.IndexedSlices` or None."""
    parts = parts_of(variable)
    if len(parts) == 1 or gradient is None:
        return [gradient] * len(parts)
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.split(gradient, [part.shape[0] for part in parts])
    # Their shape is needed where a gradient is made dense.
    return [
        tf.IndexedSlices(rows.values, rows.indices, tf.constant(part.shape.as_list(), rows.indices.dtype))
        for rows, part in zip(variable_of(variable).split_rows(gradient), parts, strict=True)
    ]


def with_parts(optimizer: Any) -> Any:
    """Returns a view of a built optimizer as if it had been built with the parts of its sharded variables.

    A variable that has slots in other parts, or in one, is left whole.
    """
    view = view_of(optimizer)
    # Private, here and below: an optimizer's slots are lists in the order of the variables that it was built with.
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
    indices: dict[Any, int] = {}
    decays: dict[Any, bool] = {}
    for variable, is_divided in zip(variables, divided, strict=True):
        for part in parts_of(variable) if is_divided else [variable]:
            key = optimizer._var_key(part)
            indices[key] = len(indices)
            decays[key] = optimizer._use_weight_decay(variable)
    # The second returns whether a variable's weights decay, which depends on the name of the whole variable.
    view.__dict__.update(
        _trainable_variables_indices=indices, _use_weight_decay=lambda part: decays[optimizer._var_key(part)]
    )
    return view


def view_of(optimizer: Any, kind: Any = None, **attributes: Any) -> Any:
    """Returns an optimizer that shares the attributes of another one, but for those given.

    Args:
      optimizer: is not changed.
      kind: the class of the view; None for that of the optimizer.
      attributes: of the view alone.
    """
    # `copy.copy` would serialize and deserialize it.
    view = object.__new__(kind or type(optimizer))
    view.__dict__.update(vars(optimizer), **attributes)
    return view


def slot_lists(optimizer: Any) -> dict[str, list[Any]]:
    """Returns the attributes of a built optimizer that are lists with an item for each variable, the variables too."""
    # Not of its variables: a view for one server may have fewer of them.
    count = len(optimizer._trainable_variables_indices)
    # `_variables` are all of the optimizer's own, in one list.
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
    """Returns the slot of each part of a variable."""
    if _has_rows(slot, variable):
        return list(parts_of(slot))
    others = len(parts_of(variable)) - 1
    if not isinstance(slot, (keras.Variable, tf.Variable)):
        return [slot] * (1 + others)
    # One that has no rows, such as a count of the variable's updates, is changed once.
    return [slot, *(LocalCopy(tf.identity(variable_of(slot))) for _ in range(others))]
