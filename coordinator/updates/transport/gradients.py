"""Whether gradients fit their variables: found out on the worker, before any of them is sent to a server.

A gradient that a server's update refuses would be in the updates of the other servers. So what can be known is checked
while a push is traced. The rest, ids of rows and shapes that are not known then, is checked by the step itself: nothing
leaves the worker before that is done.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

_ADVICE = "Push what the tape gives for this variable, in the order of the rule's variables."


def checked(
    gradients: Mapping[int, Any], variables: Sequence[Any], *, looks_at_ids: bool
) -> tuple[dict[int, Any], list[Any]]:
    """Brings gradients to their variables' dtypes, and refuses those that do not fit.

    Args:
      gradients: by the positions of their variables: tensors, or `tf.IndexedSlices`.
      variables: `tf.Variable`s.
      looks_at_ids: whether ids that are not known yet are looked at when the function runs.

    Returns:
      The gradients, and the assertions that still have to be made when the function runs: operations on the worker.
      Nothing of the gradients is there before they are made.

    Raises:
      TypeError: a dtype is neither the variable's nor a floating-point one to be cast to it, or ids are no integers.
      ValueError: a shape does not fit, or an id is of no row.
    """
    found, checks = {}, []
    for number, gradient in gradients.items():
        variable = variables[number]
        if isinstance(gradient, tf.IndexedSlices):
            found[number], more = _rows(gradient, variable)
            ids = _checks_of_ids(found[number].indices, variable)
            checks += [*more, *(ids if looks_at_ids else [])]
        else:
            found[number], more = _whole(gradient, variable)
            checks += more
    if checks:
        found = {number: awaiting(checks, gradient) for number, gradient in found.items()}
    return found, checks


def awaiting(checks: Sequence[Any], tensor: Any) -> Any:
    """The same tensor, or `tf.IndexedSlices`, which is there when the checks are made."""
    with tf.control_dependencies(list(checks)):
        if isinstance(tensor, tf.IndexedSlices):
            return tf.IndexedSlices(tf.identity(tensor.values), tf.identity(tensor.indices), tensor.dense_shape)
        return tf.identity(tensor)


def _whole(gradient: Any, variable: Any) -> tuple[Any, list[Any]]:
    """A dense gradient, and what is to be checked of it yet."""
    gradient = _cast(tf.convert_to_tensor(gradient, dtype_hint=variable.dtype), variable)
    if not gradient.shape.is_compatible_with(variable.shape):
        raise ValueError(f"{_of(variable)} must have its shape {variable.shape}, got {gradient.shape}. {_ADVICE}")
    ensured = _ensured(gradient, variable.shape, variable)
    return ensured, [] if ensured is gradient else [ensured]


def _rows(gradient: Any, variable: Any) -> tuple[Any, list[Any]]:
    """A gradient of rows, and what is to be checked of it yet."""
    values = _cast(tf.convert_to_tensor(gradient.values, dtype_hint=variable.dtype), variable)
    ids = tf.convert_to_tensor(gradient.indices)
    if not ids.dtype.is_integer:
        raise TypeError(f"{_of(variable)} must have integers as indices, got {ids.dtype.name}.")
    if variable.shape.rank == 0 or not ids.shape.is_compatible_with([None]):
        raise ValueError(
            f"{_of(variable)} of shape {variable.shape} must be rows with one index each, got indices of shape "
            f"{ids.shape}. Reshape them to one dimension, and the values with them."
        )
    expected = tf.TensorShape(ids.shape[:1] if ids.shape.rank else [None]).concatenate(variable.shape[1:])
    if not values.shape.is_compatible_with(expected):
        raise ValueError(
            f"{_of(variable)} must be rows of the variable of shape {variable.shape}, one for each of the indices of "
            f"shape {ids.shape}, got values of shape {values.shape}. {_ADVICE}"
        )
    number = ids.shape[0] if ids.shape.rank else None
    ensured_values = _ensured(values, tf.TensorShape([number]).concatenate(variable.shape[1:]), variable)
    ensured_ids = _ensured(ids, tf.TensorShape([ensured_values.shape[0]]), variable)
    checks = [now for before, now in ((values, ensured_values), (ids, ensured_ids)) if now is not before]
    if ensured_ids.shape[0] is None:
        checks += _checks_of_number(ensured_values, ensured_ids, variable)
    return tf.IndexedSlices(ensured_values, ensured_ids, gradient.dense_shape), checks


def _ensured(tensor: Any, shape: tf.TensorShape, variable: Any) -> Any:
    """The tensor with this shape, which is looked at when it is there if it is not known to have it."""
    if not _is_wider(tensor.shape, shape):
        return tensor
    # An assertion would not do: what is done with the tensor later tells its shape, and by that TensorFlow's optimizer
    # takes an assertion on it for fulfilled.
    name = re.sub(r"[^A-Za-z0-9_.]", "_", variable.name.partition(":")[0])
    return tf.ensure_shape(tensor, shape, name=f"gradient_for_{name}")


def _is_wider(known: tf.TensorShape, expected: tf.TensorShape) -> bool:
    """Whether a tensor of which this is known may turn out not to have the expected shape."""
    if expected.rank is None or known.rank is None:
        return bool(known.rank is None and expected.rank is not None)
    return any(size is None and wanted is not None for size, wanted in zip(known, expected, strict=True))


def _checks_of_ids(ids: Any, variable: Any) -> list[Any]:
    rows = variable.shape.dims and variable.shape[0]
    if rows is None:
        return []
    needed = f"{_of(variable)} has ids of rows that the variable does not have: they must be from 0 to {rows - 1}"
    known = tf.get_static_value(ids)
    if known is not None:
        outside = known[(known < 0) | (known >= rows)]
        if np.size(outside):
            raise ValueError(f"{needed}, got {outside.ravel()[0]}.")
        return []
    # Of no ids, these are the greatest and the least number that there is.
    least, greatest = tf.reduce_min(ids), tf.reduce_max(ids)
    return [
        _assertion((least >= 0) & (greatest < rows) | (least > greatest), f"{needed}; they are", least, "to", greatest)
    ]


def _checks_of_number(values: Any, ids: Any, variable: Any) -> list[Any]:
    """Whether there is a row for each id, where neither number is known."""
    rows, number = tf.shape(values)[0], tf.size(ids)
    needed = f"{_of(variable)} must have a row of values for each of its indices. Their numbers are"
    return [_assertion(tf.equal(rows, number), needed, rows, "and", number)]


def _cast(gradient: Any, variable: Any) -> Any:
    if gradient.dtype == variable.dtype:
        return gradient
    if gradient.dtype.is_floating and variable.dtype.is_floating:
        return tf.cast(gradient, variable.dtype)
    raise TypeError(
        f"{_of(variable)} must be of its dtype, {variable.dtype.name}, or of a floating-point one that is cast to it, "
        f"got {gradient.dtype.name}. Cast it before the push, if that is what is meant."
    )


def _assertion(condition: Any, *data: Any) -> Any:
    return tf.debugging.Assert(condition, list(data), summarize=8)


def _of(variable: Any) -> str:
    # Without quotes, which an assertion would show with backslashes.
    return f"The gradient for variable {variable.name}"
