"""Gradients on their way to the servers: checked on the worker, and flattened to tensors for a transfer.

If one server refused a gradient, the other servers would still apply their parts. So a push checks all that is known at
tracing time. The running step checks ids of rows and unknown shapes before anything leaves the worker.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

_ADVICE = "Push what the tape gives for this variable, in the order of the rule's variables."


def flat(gradients: Mapping[int, Any]) -> list[Any]:
    """Flattens gradients to tensors; `tf.IndexedSlices` become their values and their indices."""
    tensors: list[Any] = []
    for gradient in gradients.values():
        tensors += [gradient.values, gradient.indices] if isinstance(gradient, tf.IndexedSlices) else [gradient]
    return tensors


def rebuilt(gradients: Mapping[int, Any], tensors: Sequence[Any]) -> dict[int, Any]:
    """Returns gradients of the same structure from tensors in the order of `flat`."""
    left = iter(tensors)
    return {
        number: tf.IndexedSlices(next(left), next(left), gradient.dense_shape)
        if isinstance(gradient, tf.IndexedSlices)
        else next(left)
        for number, gradient in gradients.items()
    }


def checked(
    gradients: Mapping[int, Any], variables: Sequence[Any], checks: list[Any], *, ids: bool, values: bool
) -> tuple[dict[int, Any], list[Any]]:
    """Casts gradients, by position, to their variables' dtypes, and checks that they fit.

    `checks` are further checks. With `ids`, the function checks at run time the ids that are unknown at tracing time.
    With `values`, it checks whether values are finite. Returns the gradients, and all run-time checks: operations on
    the worker, on which the gradients depend. Raises TypeError for a dtype that cannot be cast or ids that are not
    integers; ValueError for a shape that does not fit, or an id out of range.
    """
    cast, checks = {}, [*checks]
    for number, gradient in gradients.items():
        variable = variables[number]
        if isinstance(gradient, tf.IndexedSlices):
            cast[number], more = _rows(gradient, variable)
            of_ids = _id_checks(cast[number].indices, variable)
            checks += [*more, *(of_ids if ids else [])]
        else:
            dense = _cast(tf.convert_to_tensor(gradient, dtype_hint=variable.dtype), variable)
            if not dense.shape.is_compatible_with(variable.shape):
                text = f"{_of(variable)} must have its shape {variable.shape}, got {dense.shape}. {_ADVICE}"
                raise ValueError(text)
            cast[number] = _ensured(dense, variable.shape, variable)
            checks += [] if cast[number] is dense else [cast[number]]
        if values:
            checks += value_checks(cast[number], variable)
    if checks:
        cast = {number: after_checks(checks, gradient) for number, gradient in cast.items()}
    return cast, checks


def value_checks(gradient: Any, variable: Any) -> list[Any]:
    """Returns operations that fail if a gradient has an infinite value or NaN when the function runs."""
    values = _values(gradient)
    needed = f"{_of(variable)} must be finite, since the rule was created with require_finite=True. Nothing was pushed."
    return [tf.debugging.check_numerics(values, needed)] if values.dtype.is_floating else []


def not_finite(gradients: Sequence[Any]) -> Any:
    """Returns 1 if a gradient has an infinite value or NaN, otherwise 0; an int64 scalar on the worker."""
    summaries = [
        # The result is [-1, whether a value is not finite]. The operation stops at such a value, and stores nothing.
        tf.raw_ops.DebugNumericSummaryV2(input=values, output_dtype=tf.float32, tensor_debug_mode=2)
        for values in (_values(gradient) for gradient in gradients if gradient is not None)
        if values.dtype.is_floating
    ]
    return tf.cast(tf.add_n(summaries)[1] > 0, tf.int64) if summaries else tf.constant(0, tf.int64)


def after_checks(checks: Sequence[Any], tensor: Any) -> Any:
    """Returns a copy of a tensor, or of `tf.IndexedSlices`, that depends on the checks."""
    with tf.control_dependencies(list(checks)):
        if isinstance(tensor, tf.IndexedSlices):
            return tf.IndexedSlices(tf.identity(tensor.values), tf.identity(tensor.indices), tensor.dense_shape)
        return tf.identity(tensor)


def _rows(gradient: Any, variable: Any) -> tuple[Any, list[Any]]:
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
    ensured_values = _ensured(values, expected, variable)
    ensured_ids = _ensured(ids, tf.TensorShape([ensured_values.shape[0]]), variable)
    checks = [now for before, now in ((values, ensured_values), (ids, ensured_ids)) if now is not before]
    if ensured_ids.shape[0] is None:
        rows, number = tf.shape(ensured_values)[0], tf.size(ensured_ids)
        needed = f"{_of(variable)} must have a row of values for each of its indices. Their numbers are"
        checks.append(_assertion(tf.equal(rows, number), needed, rows, "and", number))
    return tf.IndexedSlices(ensured_values, ensured_ids, gradient.dense_shape), checks


def _ensured(tensor: Any, shape: tf.TensorShape, variable: Any) -> Any:
    """Returns the tensor with this shape. If the shape is unknown, it is checked at run time."""
    if tensor.shape.is_subtype_of(shape):
        return tensor
    # TensorFlow's optimizer would remove an assertion as always true, because later operations imply the shape.
    name = re.sub(r"[^A-Za-z0-9_.]", "_", variable.name.partition(":")[0])
    return tf.ensure_shape(tensor, shape, name=f"gradient_for_{name}")


def _id_checks(ids: Any, variable: Any) -> list[Any]:
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
    # If there are no ids, `least` is the dtype's largest number, and `greatest` the dtype's smallest number.
    least, greatest = tf.reduce_min(ids), tf.reduce_max(ids)
    return [
        _assertion((least >= 0) & (greatest < rows) | (least > greatest), f"{needed}; they are", least, "to", greatest)
    ]


def _values(gradient: Any) -> Any:
    return tf.convert_to_tensor(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient)


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
    # An assertion would escape quotes around the name.
    return f"The gradient for variable {variable.name}"
