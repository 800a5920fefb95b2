"""The variables that a rule updates, by parameter server, and transfers between the servers and the worker.

Transfers are packed here only for steps that may wait for other workers, in branches and loops too. In other functions
`coordinator.ps_strategy.fusing.message_packing` packs them, once the functions are fused or have run often; packing
them here as well would copy them twice.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.fusing.message_packing import MAX_PACKED_BYTES, is_worth_packing, pack
from coordinator.ps_strategy.keras.internals.parts import gradients_of_parts, parts_of, variable_of
from coordinator.updates.transport.gradients import flat, rebuilt
from coordinator.updates.transport.rounding import is_rounded, restored, rounded


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
            if tf.DeviceSpec.from_string(variable.device).job != "ps":
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
