"""Which rows of a sharded variable are in which part: TensorFlow's "div" layout.

Each part has consecutive rows, the first ones one row more if they cannot all have the same number: 10 rows in 4 parts
are 3 + 3 + 2 + 2.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Routed:
    """Rows by the part that they are in.

    Attributes:
      part: of each row, int32 [n].
      local: for each part, the indices in this part, as given [n of the part].
      count: of parts.
    """

    part: Any
    local: Sequence[Any]
    count: int

    def split(self, values: Any) -> list[Any]:
        """Returns the values of each part's rows, for values of all rows, [n, ...]."""
        return tf.dynamic_partition(values, self.part, self.count)

    def stitch(self, found: Sequence[Any]) -> Any:
        """Returns what belongs to each row, [n, ...], for what belongs to those of each part."""
        positions = self.split(tf.range(tf.size(self.part)))
        return tf.dynamic_stitch(positions, found)


@dataclasses.dataclass(frozen=True)
class Partition:
    """A division of rows into parts.

    Attributes:
      rows: number of rows.
      parts: number of parts, at least 1 and at most that of rows.
    """

    rows: int
    parts: int

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each part."""
        base, extra = divmod(self.rows, self.parts)
        return (base + 1,) * extra + (base,) * (self.parts - extra)

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first row of each part."""
        return (0, *itertools.accumulate(self.sizes))[:-1]

    def route(self, indices: Any) -> Routed:
        """Finds the parts of rows.

        Args:
          indices: int32 or int64 [n]. One outside of the variable is given to the first or last part, where it is
            outside too, so that the part's server refuses it.
        """
        base, extra = divmod(self.rows, self.parts)
        part = (indices - extra) // base
        if extra:
            part = tf.maximum(part, indices // (base + 1))
        part = tf.clip_by_value(part, 0, self.parts - 1)
        local = indices - part * base - (tf.minimum(part, extra) if extra else 0)
        part = tf.cast(part, tf.int32)
        return Routed(part, tf.dynamic_partition(local, part, self.parts), self.parts)
