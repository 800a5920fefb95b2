"""The local copies that a step reads instead of the variables themselves, and the version that it pulled with them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.reads import graph_around, is_within
from coordinator.updates.transport.gradients import after_checks
from coordinator.updates.transport.rounding import read_rounded

_NEEDED = "The version of a push must be the value of its rule.pull(), an int64 scalar;"
# The operations of which a function gets its arguments, and the results of the functions that it calls.
_FROM_ELSEWHERE = ("Placeholder", "PartitionedCall", "StatefulPartitionedCall")


@dataclasses.dataclass(frozen=True)
class PulledModel:
    """A model as a step pulled it.

    Attributes:
      version: of the model, an int64 scalar.
      scalars: the values of the optimizer's scalars.
      values: tensors on the worker, by the positions of their variables.
      size: of what was transferred, in bytes, an int64 scalar.
      pulls: 1, or 0 if nothing was transferred; may be an int64 scalar.
      rule_data: for the rule's push; None if the pull was in another function.
      worker: the index of the worker, an int64 scalar; known to the push.
      checks: operations on the worker before which the push changes nothing; see `after`.
      number: of the range that the push is computed on, an int64 scalar; None without one.
      not_finite: 1 if the push has a value that is not finite, otherwise 0; an int64 scalar.
    """

    version: Any
    scalars: Sequence[Any]
    values: Mapping[int, Any]
    size: Any
    pulls: Any
    rule_data: Any = None
    worker: Any = None
    checks: Sequence[Any] = ()
    number: Any = None
    not_finite: Any = 0

    def after(self, checks: Sequence[Any]) -> "PulledModel":
        """Returns a copy whose version, scalars and worker depend on the checks of a push."""
        if not checks:
            return self
        version, worker, *scalars = (after_checks(checks, each) for each in (self.version, self.worker, *self.scalars))
        return dataclasses.replace(self, version=version, worker=worker, scalars=scalars, checks=checks)

    def values_of(self, gradients: Mapping[int, Any], variables: Sequence[Any]) -> dict[int, Any]:
        """Returns the values of the variables that have dense gradients, by position; they depend on the checks.

        Raises:
          ValueError: one was not pulled.
        """
        dense = [number for number, gradient in gradients.items() if not isinstance(gradient, tf.IndexedSlices)]
        if missing := [variables[number].name for number in dense if number not in self.values]:
            raise ValueError(
                f"The rule sends pulled values with the gradients, and has none of {missing[0]}. Call rule.pull() and "
                "rule.push() in one function; a variable of embeddings= must have gradients of rows, tf.IndexedSlices."
            )
        return {number: after_checks(self.checks, self.values[number]) for number in dense}


def checked_version(version: Any) -> Any:
    """Converts the version of a push to a tensor.

    Raises:
      TypeError: it is no int64 scalar.
    """
    try:
        converted = tf.convert_to_tensor(version, tf.int64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{_NEEDED} got {version!r}.") from error
    if not converted.shape.is_compatible_with([]):
        raise TypeError(f"{_NEEDED} got one of shape {converted.shape}.")
    return converted


def latest_pull(key: str, version: Any) -> PulledModel | None:
    """Returns the last pull of the function that is being traced; None if it was in another function.

    Args:
      key: the pulls are stored in the function's graph under this key.
      version: of the push.

    Raises:
      ValueError: there is none, and the version comes neither from an argument of the function nor from another one.
    """
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if found := graph.get_collection_ref(key):
            pulled: PulledModel = found[-1]
            return pulled
        graph = graph_around(graph)
    if is_within(version.graph) and version.op.type not in _FROM_ELSEWHERE:
        raise ValueError(
            "rule.push() found no rule.pull() of this rule. Compute the gradients in `with rule.pull() as version:`, "
            "and push them with this version; or call rule.run(), which does both."
        )
    return None


class PulledVariable:
    """The local copy of a variable, for the current graph and the branches and loops inside it.

    It is the reader of the variable for `reads_replaced`: a read of the variable gives the copy, the same one each time
    although the variable may have changed. A lookup of rows of a variable without a copy reads these rows on the
    variable's server; a read of all of it creates the copy. A `tf.function` that is called meanwhile reads the variable
    itself, since it may be called from other places too.

    Args:
      variable: a `tf.Variable`.
      copy: a tensor; None to copy the variable when it is read.
      transfer_dtype: of the message with that copy; None for the variable's own.

    Attributes:
      read_later: what was sent for the copy if it was created by a read, and the rows that were looked up.
    """

    def __init__(self, variable: Any, copy: Any, transfer_dtype: tf.DType | None = None) -> None:
        self.read_later: list[Any] = []
        self._variable = variable
        self._copy = copy
        self._transfer_dtype = transfer_dtype
        self._graph = tf.compat.v1.get_default_graph()

    def copy(self, *, may_make: bool) -> Any:
        """Returns what is read instead of the variable; None for the variable itself."""
        if not is_within(self._graph):
            return None
        if self._copy is None and may_make:
            # In the outer graph, whichever branch or loop reads it first, so that all share it.
            with self._graph.as_default(), tf.control_dependencies(None):
                self._copy, sent = read_rounded(self._variable, self._transfer_dtype)
            self.read_later += sent
        return self._copy

    def note_rows(self, rows: Any) -> None:
        """Records rows that were looked up, except in a branch or a loop, whose tensors cannot be used outside."""
        if tf.compat.v1.get_default_graph() is self._graph:
            self.read_later.append(rows)
