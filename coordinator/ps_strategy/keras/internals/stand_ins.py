"""What replaces variables in one update of a Keras 3 optimizer: a value, or the rows of a variable."""

from typing import Any

import tensorflow as tf


class StandIn:
    """A value in place of a variable that the update may set for itself, and does not change."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.dtype: str = value.dtype.name

    @property
    def value(self) -> Any:
        """The present value, a tensor."""
        return self._value

    def assign(self, value: Any) -> None:
        """Sets the value for the rest of the update."""
        self._value = value

    def assign_add(self, value: Any) -> None:
        """Does nothing: it is called for the count of updates alone, and the caller counts the update once."""

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        return self.value if dtype is None else tf.cast(self.value, dtype)

    def __add__(self, other: Any) -> Any:
        return self.value + other

    def __radd__(self, other: Any) -> Any:
        return other + self.value

    def __sub__(self, other: Any) -> Any:
        return self.value - other

    def __rsub__(self, other: Any) -> Any:
        return other - self.value

    def __mul__(self, other: Any) -> Any:
        return self.value * other

    def __rmul__(self, other: Any) -> Any:
        return other * self.value

    def __truediv__(self, other: Any) -> Any:
        return self.value / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.value

    def __pow__(self, other: Any) -> Any:
        return self.value**other

    def __neg__(self) -> Any:
        return -self.value

    def __mod__(self, other: Any) -> Any:
        return self.value % other


class LocalCopy(StandIn):
    """A value that an update changes for itself, in place of a variable that another part of the update changes."""

    def assign_add(self, value: Any) -> None:
        """Adds to the value for the rest of the update."""
        self.assign(self.value + value)

    def assign_sub(self, value: Any) -> None:
        """Subtracts from the value for the rest of the update."""
        self.assign(self.value - value)


class Rows(StandIn):
    """Some rows of a variable: what is done to them is done to the variable, on its server, and to no other row.

    Additions and subtractions are those of the variable's `scatter_add` and `scatter_sub`, so that none is lost when
    others change the same rows; so is `assign(rows + x)`. Rows are read when they are needed, and once.

    Args:
      variable: a `tf.Variable`.
      indices: of the rows, each once, int32 or int64 [n].
    """

    def __init__(self, variable: tf.Variable, indices: Any) -> None:
        super().__init__(variable)
        self.variable = variable
        self._indices = indices
        self._value = None
        self.shape = tf.TensorShape(indices.shape[:1]).concatenate(variable.shape[1:])

    @property
    def value(self) -> Any:
        """The rows as this update leaves them so far, [n, ...]."""
        if self._value is None:
            self._value = self.variable.sparse_read(self._indices)
        return self._value

    def assign(self, value: Any) -> None:
        """Assigns to the rows."""
        added = self._added(value)
        if added is None:
            self.variable.scatter_update(self._slices(value))
        else:
            self.variable.scatter_add(self._slices(added))
        self._value = value

    def assign_add(self, value: Any) -> None:
        """Adds to the rows."""
        self.variable.scatter_add(self._slices(value))
        if self._value is not None:
            self._value = self._value + value

    def assign_sub(self, value: Any) -> None:
        """Subtracts from the rows."""
        self.variable.scatter_sub(self._slices(value))
        if self._value is not None:
            self._value = self._value - value

    def _slices(self, value: Any) -> tf.IndexedSlices:
        return tf.IndexedSlices(value, self._indices)

    def _added(self, value: Any) -> Any | None:
        """Returns what was added to the rows to get this value; None if it is no such sum."""
        if not tf.is_symbolic_tensor(value) or value.op.type not in ("Add", "AddV2"):
            return None
        left, right = value.op.inputs
        return right if left is self._value else left if right is self._value else None


class UnsharedRows(Rows):
    """Rows that nothing else changes meanwhile: they are read once, and the caller writes them when all is computed.

    Attributes:
      is_changed: whether there is something to write: `value`.
    """

    def __init__(self, variable: tf.Variable, indices: Any) -> None:
        super().__init__(variable, indices)
        self.is_changed = False

    def assign(self, value: Any) -> None:
        """Sets the rows that are to be written."""
        value = tf.convert_to_tensor(value, self.variable.dtype)
        self._value = tf.broadcast_to(value, tf.shape(self.value)) if value.shape.rank == 0 else value
        self.is_changed = True

    def assign_add(self, value: Any) -> None:
        """Adds to the rows."""
        self.assign(self.value + value)

    def assign_sub(self, value: Any) -> None:
        """Subtracts from the rows."""
        self.assign(self.value - value)
