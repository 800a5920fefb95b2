"""Tables among the variables of a rule: they update their rows themselves, by key, on all servers.

The variables that a rule updates, by parameter server, and transfers between the servers and the worker.

Transfers are packed here only for steps that may wait for other workers, in branches and loops too. In other functions
`coordinator.ps_strategy.fusing.message_packing` packs them, once the functions are fused or have run often; packing
them here as well would copy them twice.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.fusing.message_packing import MAX_PACKED_BYTES, is_worth_packing, pack
from coordinator.ps_strategy.keras.internals.optimizers import gradients_of_parts, parts_of, variable_of
from coordinator.ps_strategy.tensorflow_internals.handles import is_on_parameter_server
from coordinator.ps_strategy.tensorflow_internals.shared_variable import graph_around, is_within
from coordinator.ps_strategy.tensorflow_internals.unstored_variable import TableVariable
from coordinator.updates.gradients import (
    after_checks,
    flat,
    is_rounded,
    read_rounded,
    rebuilt,
    restored,
    rounded,
    value_checks,
)


class Model:
    """A list of variables, by server. A sharded variable is the list of its parts.

    Args:
      variables: `tf.Variable`s or `keras.Variable`s on parameter servers.
      embeddings: those of them whose rows are looked up one by one, and which are never copied as a whole. By default
        the sharded variables and those of `Embedding` layers.
      transfer_dtype: the dtype of messages with dense variables and gradients; None for that of the variables.

    Raises:
      ValueError: there is no variable, one is listed twice, one is not on a parameter server, or an embedding is not
        among them.

    Attributes:
      given: the variables, as given.
      wholes: as `tf.Variable`s.
      originals: the variables as given, with parts in place of sharded ones. What follows, and rules, have positions in
        this list.
      variables: as `tf.Variable`s.
      embeddings, dense: the positions of the embeddings, and of the other variables.
      by_device: the positions of the variables on each server, by its CPU's name.
      are_embeddings_given: whether somebody has said which variables are embeddings.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        embeddings: Sequence[Any] | None = None,
        transfer_dtype: tf.DType | None = None,
    ) -> None:
        self.given = list(variables)
        self.transfer_dtype = transfer_dtype
        self.wholes = [variable_of(variable) for variable in self.given]
        if not self.wholes:
            raise ValueError("A rule needs at least one variable to update; the list of variables is empty.")
        wholes = {id(variable): number for number, variable in enumerate(self.wholes)}
        if len(wholes) < len(self.wholes):
            raise ValueError("A variable is in the list of variables twice.")
        for variable in self.wholes:
            if not is_on_parameter_server(variable.device):
                raise ValueError(
                    f"The variable {variable.name!r} is on {variable.device or 'no server'}, not on a parameter "
                    "server. Create it inside strategy.scope()."
                )
        self.originals: list[Any] = []
        # By the number of the whole variable.
        self._positions: list[range] = []
        for each in self.given:
            parts = parts_of(each)
            self._positions.append(range(len(self.originals), len(self.originals) + len(parts)))
            self.originals += parts
        self.variables = [variable_of(variable) for variable in self.originals]
        self.are_embeddings_given = embeddings is not None
        if embeddings is None:
            embeddings = [variable for variable in self.given if _is_embedding(variable)]
        unknown = [variable for variable in map(variable_of, embeddings) if id(variable) not in wholes]
        if unknown:
            raise ValueError(f"The embedding {unknown[0].name!r} is not among the rule's variables.")
        self.embeddings = frozenset(
            position for each in embeddings for position in self._positions[wholes[id(variable_of(each))]]
        )
        self.dense = tuple(number for number in range(len(self.variables)) if number not in self.embeddings)
        self.by_device = _by_device(self.variables)

    def divided(self, gradients: Mapping[int, Any]) -> dict[int, Any]:
        """Returns gradients by position, for gradients by the number of the whole variable."""
        return {
            position: part
            for number, gradient in gradients.items()
            for position, part in zip(
                self._positions[number], gradients_of_parts(gradient, self.wholes[number]), strict=True
            )
        }

    def send(
        self, device: str, gradients: Mapping[int, Any], extras: Sequence[Any], *, is_packed: bool
    ) -> tuple[dict[int, Any], list[Any], Any]:
        """Sends the gradients of a server's variables there, with further tensors.

        Args:
          device: the server.
          gradients: of all servers, by position.
          extras: the further tensors.
          is_packed: see `transfer`.

        Returns:
          These gradients, in the dtypes of their variables, and the further tensors, on the server; the size of all
          messages in bytes, an int64 scalar.
        """
        mine = {number: gradients[number] for number in self.by_device.get(device, ()) if number in gradients}
        tensors = flat(mine)
        arrived, size = transfer([*tensors, *extras], None, device, is_packed=is_packed)
        with tf.device(device):
            there = rebuilt(mine, arrived[: len(tensors)])
            gradients_there = {number: restored(each, self.variables[number]) for number, each in there.items()}
            return gradients_there, arrived[len(tensors) :], size

    def joined(self, values: Mapping[int, Any]) -> list[Any]:
        """Returns the values of whole variables, for values by position; None for those that are not complete."""
        found = []
        for positions in self._positions:
            parts = [values.get(position) for position in positions]
            is_complete = all(part is not None for part in parts)
            found.append(None if not is_complete else parts[0] if len(parts) == 1 else tf.concat(parts, 0))
        return found

    def pulled_at_once(self, *, with_large: bool = False) -> list[int]:
        """Returns the positions of the variables that are pulled before they are read: small, and not embeddings."""
        return [number for number in self.dense if with_large or not self.is_large(number)]

    def is_rounded(self, number: int) -> bool:
        """Returns whether the variable at a position, and dense gradients for it, are rounded when they are sent."""
        return self.transfer_dtype is not None and number not in self.embeddings and is_rounded(self.variables[number])

    def rounded(self, gradients: Mapping[int, Any]) -> dict[int, Any]:
        """Returns gradients by position as they are sent: in the dtype of messages where they are rounded."""
        return {
            number: rounded(gradient, self.transfer_dtype) if self.is_rounded(number) else gradient
            for number, gradient in gradients.items()
        }

    def transfer_dtypes(self) -> list[tf.DType | None]:
        """Returns the dtype of messages with each of the whole variables; None for its own."""
        return [self.transfer_dtype if self.is_rounded(positions[0]) else None for positions in self._positions]

    def is_large(self, number: int) -> bool:
        """Returns whether the variable at a position has more than 1 MB, or an unknown size."""
        variable = self.variables[number]
        elements = variable.shape.num_elements()
        return elements is None or elements * variable.dtype.size > MAX_PACKED_BYTES

    def __repr__(self) -> str:
        return f"<Model: {len(self.variables)} variables on {len(self.by_device)} servers>"


def transfer(
    tensors: Sequence[Any], source: str | None, target: str | None, *, is_packed: bool = True, is_mixed: bool = False
) -> tuple[list[Any], tf.Tensor]:
    """Transfers tensors from one device to another.

    Args:
      tensors: any.
      source: the device that they are on; None is the worker.
      target: where they are needed; None is the worker.
      is_packed: whether small tensors of one dtype go in one message, if all dimensions but the first are known.
        Otherwise no tensor is available before all are.
      is_mixed: whether those of all dtypes go in one message.

    Returns:
      The tensors on the target device, in their order, and their size in bytes, an int64 scalar.
    """
    size = bytes_of(tensors, source)
    if not is_packed:
        with tf.device(target):
            return tf.identity_n(tensors), size
    with tf.device(target):
        arrived = [None if is_worth_packing(tensor) else tf.identity(tensor) for tensor in tensors]
    for kind in dict.fromkeys(None if is_mixed else tensor.dtype for tensor in tensors):
        numbers = [n for n, tensor in enumerate(tensors) if kind in (None, tensor.dtype) and arrived[n] is None]
        for number, tensor in zip(numbers, pack([tensors[n] for n in numbers], source, target), strict=True):
            arrived[number] = tensor
    return arrived, size


def bytes_of(tensors: Sequence[Any], source: str | None) -> tf.Tensor:
    """Returns the size of tensors in bytes, an int64 scalar; known shapes need no message for it.

    Args:
      tensors: any.
      source: the device that they are on; None is the worker.
    """
    known = [tensor for tensor in tensors if tensor.shape.is_fully_defined()]
    sizes = [tf.constant(sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in known), tf.int64)]
    with tf.device(source):
        others = [
            tf.size(tensor, tf.int64) * tensor.dtype.size for tensor in tensors if not tensor.shape.is_fully_defined()
        ]
        if others:
            sizes.append(tf.add_n(others))
    return tf.add_n(sizes)


def pull(
    variables: Sequence[Any],
    after: Sequence[Any],
    only_on: str | None = None,
    *,
    is_packed: bool = True,
    transfer_dtype: tf.DType | None = None,
) -> tuple[list[Any], Any]:
    """Transfers the values of variables to the worker.

    Args:
      variables: `tf.Variable`s on any server.
      after: tensors; nothing is read before they are available.
      only_on: the device whose variables wait for these; None is all devices.
      is_packed: see `transfer`.
      transfer_dtype: the dtype of messages with tensors that are rounded; None rounds nothing.

    Returns:
      The values, in the dtypes of the variables, and the size of the messages in bytes, an int64 scalar.
    """
    values: dict[int, Any] = {}
    sizes = [tf.constant(0, tf.int64)]
    for device, numbers in _by_device(variables).items():
        awaited = list(after) if only_on in (None, device) else []
        with tf.device(device), tf.control_dependencies(awaited):
            read = [rounded(variables[number].read_value(), transfer_dtype) for number in numbers]
        arrived, size = transfer(read, device, None, is_packed=is_packed)
        with tf.device(None):
            values.update(
                (number, restored(value, variables[number])) for number, value in zip(numbers, arrived, strict=True)
            )
        sizes.append(size)
    return [values[number] for number in range(len(variables))], tf.add_n(sizes)


def _by_device(variables: Sequence[Any]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for number, variable in enumerate(variables):
        found.setdefault(variable.device, []).append(number)
    return found


def _is_embedding(variable: Any) -> bool:
    """Returns whether steps look up rows of a variable: it is sharded, or has the name of those of Embedding layers."""
    name = variable_of(variable).name.rpartition("/")[2].partition(":")[0]
    return len(parts_of(variable)) > 1 or name == "embeddings"


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


class TablesOfRule:
    """Finds the tables among a rule's variables, and their gradients among those that are pushed.

    Args:
      variables: of the rule, as given.

    Attributes:
      given: all variables of the rule.
      variables: those that are the `variable` of a table, by their positions.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        # Here and not in the rule, since TensorFlow would save them with the rule's checkpoints.
        self.given = tuple(variables)
        self.variables: dict[int, TableVariable] = {
            number: variable
            for number, variable in enumerate(map(variable_of, variables))
            if isinstance(variable, TableVariable)
        }

    def others(self, values: Sequence[Any]) -> list[Any]:
        """Returns the variables, or their gradients, that are not of tables."""
        return [value for number, value in enumerate(values) if number not in self.variables]

    def value_checks(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns operations that fail if a gradient of a table, of those of a push, is not finite."""
        given = [(gradients[number], table) for number, table in self.variables.items()]
        return [check for gradient, table in given if gradient is not None for check in value_checks(gradient, table)]

    def apply(self, gradients: Sequence[Any], checks: Sequence[Any], accepted: Any, *, may_reject: bool) -> Any:
        """Applies the gradients of tables if the others were accepted; returns `accepted`.

        Args:
          gradients: those of a push, of all variables; None for a table that the step did not use.
          checks: operations before which nothing is changed.
          accepted: a bool scalar.
          may_reject: whether `accepted` may be False.
        """
        given = [
            (table, gradients[number]) for number, table in self.variables.items() if gradients[number] is not None
        ]

        def apply_all() -> Any:
            with tf.control_dependencies(list(checks)):
                for table, gradient in given:
                    table.apply_gradients(gradient)
            return tf.constant(True)

        if given and may_reject:
            tf.cond(accepted, apply_all, lambda: tf.constant(False))
        elif given:
            apply_all()
        return accepted
