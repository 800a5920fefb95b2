"""Initial values of Keras' variables, by rows.

Random values are drawn in blocks of rows. The size of a block depends only on the variable's shape and dtype, so that
the values do not depend on the number of parts. A server draws only the blocks that contain its rows. The first block
has the values that the initializer draws without a strategy; a variable with a single block has exactly these values.
"""

import copy
import functools
import random
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.initializers.random_initializers import compute_fans

from coordinator.ps_strategy.sharded.creation import InitialValue, rows_of_block, rows_of_whole

_initializers = keras.initializers
_CONSTANT = {kind.__call__ for kind in (_initializers.Zeros, _initializers.Ones, _initializers.Constant)}
_INDEPENDENT = {
    kind.__call__ for kind in (_initializers.RandomNormal, _initializers.RandomUniform, _initializers.TruncatedNormal)
}
_SCALED = _initializers.VarianceScaling.__call__


def initial_value_of_keras(function: Any) -> InitialValue | None:
    """Returns the initial value that the function of a `keras.Variable` computes; None for any other function."""
    # Private: Keras gives TensorFlow a function without arguments. The shape is in the function's closure.
    code = getattr(function, "__code__", None)
    if code is None or code.co_freevars != ("initializer", "self"):
        return None
    initializer, variable = (cell.cell_contents for cell in function.__closure__)
    if not isinstance(variable, keras.Variable):
        return None
    shape, dtype = tf.TensorShape(variable._shape), tf.as_dtype(variable.dtype)
    rows = _Rows(initializer, shape, dtype, variable.path, function)
    return InitialValue(shape, dtype, rows, function, rows.block_rows if rows.are_drawn else None)


class _Rows:
    """Rows of an initializer's result for a shape; rows of a large shape only have the same distribution."""

    def __init__(self, initializer: Any, shape: tf.TensorShape, dtype: tf.DType, name: str, whole: Any) -> None:
        self._initializer = initializer
        self._shape = shape
        self._dtype = dtype
        self._name = name
        self._whole = whole

    def __call__(self, first: int, count: int) -> Any:
        kind = type(self._initializer).__call__
        if kind in _CONSTANT and np.ndim(getattr(self._initializer, "value", 0)) == 0:
            return self._initializer([count, *self._shape[1:]], dtype=self._dtype.name)
        if self.are_drawn:
            blocks = [self._drawn(*block) for block in self._blocks(first, count)]
            return blocks[0] if len(blocks) == 1 else tf.concat(blocks, 0)
        return rows_of_whole(self._whole, self._shape, self._dtype, self._name, first, count)

    @property
    def are_drawn(self) -> bool:
        """Whether the initializer draws random values that do not depend on each other."""
        kind = type(self._initializer).__call__
        return kind in _INDEPENDENT or kind is _SCALED

    @property
    def block_rows(self) -> int:
        """The number of rows that are drawn together."""
        return rows_of_block(self._shape, self._dtype)

    def _blocks(self, first: int, count: int) -> list[tuple[int, int, int, int]]:
        """Returns the number and size of each block that has some of the rows, with the begin and end of these rows."""
        size, end = self.block_rows, first + count
        return [
            (begin // size, min(size, self._shape[0] - begin), max(0, first - begin), min(size, end - begin))
            for begin in range(first // size * size, end, size)
        ]

    def _drawn(self, number: int, size: int, begin: int, end: int) -> Any:
        initializer, shape = copy.copy(self._initializer), [size, *self._shape[1:]]
        if number or not isinstance(self._seed, int):
            initializer.seed = random.Random(f"{self._seed} {number}").randrange(1, 10**9)
        if type(initializer).__call__ is _SCALED:
            # Each block is drawn with the scale of the whole shape.
            initializer.scale *= _fan(initializer, shape) / _fan(initializer, self._shape.as_list())
        drawn = initializer(shape, dtype=self._dtype.name)
        return drawn if (begin, end) == (0, size) else drawn[begin:end]

    @functools.cached_property
    def _seed(self) -> Any:
        seed = self._initializer.seed
        return seed if isinstance(seed, int) else np.asarray(seed.next()).tolist()


def _fan(initializer: Any, shape: Any) -> float:
    # Initializers of older versions of Keras have no axes.
    axes = {name: vars(initializer)[name] for name in ("input_axes", "output_axes") if name in vars(initializer)}
    fans = compute_fans(shape, **axes)
    weights = {"fan_in": (1.0, 0.0), "fan_out": (0.0, 1.0)}.get(initializer.mode, (0.5, 0.5))
    return max(1.0, sum(fan * weight for fan, weight in zip(fans, weights, strict=True)))
