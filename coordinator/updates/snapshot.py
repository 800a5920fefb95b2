"""The local copies that a step reads instead of the variables themselves."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy import tensorflow_internals


class Snapshot:
    """One local copy per variable, for the graph that it was made in and the branches and loops inside that one.

    While it is in force, reading a variable gives its copy, which is the same each time although the variable may have
    changed, and gradients go to the variable as ever. Looking up rows of a variable that has no copy yet reads those
    rows alone, where the variable is; reading all of it makes the copy. A `tf.function` that is called meanwhile reads
    the variables themselves, as it may be called from elsewhere too.

    Args:
      variables: `tf.Variable`s.
      copies: tensors, by the position of their variables; the others are copied when they are read.
    """

    def __init__(self, variables: Sequence[Any], copies: Mapping[int, Any]) -> None:
        self._variables = variables
        self._copies = dict(copies)
        self._graph = tf.compat.v1.get_default_graph()
        self._read_later: list[Any] = []

    @property
    def read_later(self) -> list[Any]:
        """The copies that were made, and the rows that were looked up, because a variable was read."""
        return self._read_later

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """A scope in which reads give the copies.

        Raises:
          ValueError: another snapshot of one of the variables is in force already.
        """
        readers = [_Copy(self, number) for number in range(len(self._variables))]
        with tensorflow_internals.reads_replaced(self._variables, readers):
            yield

    def copy(self, number: int, *, may_make: bool) -> Any:
        """What is read instead of a variable; None for the variable itself."""
        if not tensorflow_internals.is_within(self._graph):
            return None
        if number not in self._copies and may_make:
            # Made in the outer graph, whichever branch or loop reads it first, so that all share it.
            with self._graph.as_default(), tf.control_dependencies(None):
                self._copies[number] = tensorflow_internals.read_variable(self._variables[number])
            self._read_later.append(self._copies[number])
        return self._copies.get(number)

    def note_rows(self, rows: Any) -> None:
        """Notes rows that were looked up, unless that was in a branch or a loop, whose tensors cannot leave it."""
        if tf.compat.v1.get_default_graph() is self._graph:
            self._read_later.append(rows)


class _Copy:
    """The reader of one variable."""

    def __init__(self, snapshot: Snapshot, number: int) -> None:
        self._snapshot = snapshot
        self._number = number

    def copy(self, *, may_make: bool) -> Any:
        return self._snapshot.copy(self._number, may_make=may_make)

    def note_rows(self, rows: Any) -> None:
        self._snapshot.note_rows(rows)
