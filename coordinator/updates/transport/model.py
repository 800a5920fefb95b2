"""The variables that a rule updates, as they lie on the parameter servers."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.fusing.message_packing import LARGEST_PACKED
from coordinator.ps_strategy.keras_internals import variable_of
from coordinator.updates.parcel import send


@dataclasses.dataclass(frozen=True)
class ServerPart:
    """What of the model is on one server.

    Attributes:
      device: the server's CPU.
      numbers: the positions of its variables in the model.
    """

    device: str
    numbers: tuple[int, ...]


class Model:
    """A list of variables, by server.

    Args:
      variables: `tf.Variable`s or `keras.Variable`s on parameter servers.
      embeddings: those of them of which single rows are looked up, and which are never copied as a whole.

    Raises:
      ValueError: there is no variable, one is twice there, one is not on a parameter server, or an embedding is not
        among them.
    """

    def __init__(self, variables: Sequence[Any], embeddings: Sequence[Any] = ()) -> None:
        self.originals = list(variables)
        self.variables = [variable_of(variable) for variable in self.originals]
        if not self.variables:
            raise ValueError("A rule needs at least one variable to update; the list of variables is empty.")
        positions = {id(variable): number for number, variable in enumerate(self.variables)}
        if len(positions) < len(self.variables):
            raise ValueError("A variable is in the list of variables twice.")
        for variable in self.variables:
            if tf.DeviceSpec.from_string(variable.device).job != "ps":
                raise ValueError(
                    f"The variable {variable.name!r} is on {variable.device or 'no server'}, not on a parameter "
                    "server. Make it inside strategy.scope()."
                )
        unknown = [variable for variable in map(variable_of, embeddings) if id(variable) not in positions]
        if unknown:
            raise ValueError(f"The embedding {unknown[0].name!r} is not among the rule's variables.")
        self.embeddings = frozenset(positions[id(variable_of(variable))] for variable in embeddings)
        self.parts = tuple(ServerPart(device, tuple(numbers)) for device, numbers in _by_device(self.variables).items())

    @property
    def dense(self) -> tuple[int, ...]:
        """The positions of the variables that are no embeddings."""
        return tuple(number for number in range(len(self.variables)) if number not in self.embeddings)

    def pulled_at_once(self) -> list[int]:
        """The positions of those that are worth pulling before anybody reads them: small, and no embeddings."""
        return [number for number in self.dense if _size(self.variables[number]) <= LARGEST_PACKED]

    def numbers_on(self, device: str) -> tuple[int, ...]:
        """The positions of the variables on one server."""
        return next((part.numbers for part in self.parts if part.device == device), ())

    def __repr__(self) -> str:
        return f"<Model: {len(self.variables)} variables on {len(self.parts)} servers>"


def pull(
    variables: Sequence[Any], after: Sequence[Any], only_on: str | None = None, *, is_joined: bool = True
) -> tuple[list[Any], Any]:
    """Brings the values of variables to the worker.

    Args:
      variables: `tf.Variable`s, wherever they are.
      after: tensors; nothing is read before they are there.
      only_on: the device of the variables that wait for these; None is all.
      is_joined: whether those of one server are joined here; see `send`.

    Returns:
      The values, and how many bytes they have, an int64 scalar.
    """
    values: dict[int, Any] = {}
    sizes = [tf.constant(0, tf.int64)]
    for device, numbers in _by_device(variables).items():
        awaited = list(after) if only_on in (None, device) else []
        with tf.device(device), tf.control_dependencies(awaited):
            read = [variables[number].read_value() for number in numbers]
        parcel = send(read, device, None, is_joined=is_joined)
        values.update(zip(numbers, parcel.tensors, strict=True))
        sizes.append(parcel.size)
    return [values[number] for number in range(len(variables))], tf.add_n(sizes)


def flat(gradients: Mapping[int, Any], numbers: Sequence[int]) -> list[Any]:
    """The tensors of some gradients: of `tf.IndexedSlices`, the values and the indices."""
    found: list[Any] = []
    for number in numbers:
        gradient = gradients[number]
        found += [gradient.values, gradient.indices] if isinstance(gradient, tf.IndexedSlices) else [gradient]
    return found


def rebuilt(gradients: Mapping[int, Any], numbers: Sequence[int], tensors: Sequence[Any]) -> list[Any]:
    """Gradients like some others, of other tensors, as `flat` gives them."""
    rest = iter(tensors)
    return [
        tf.IndexedSlices(next(rest), next(rest), gradients[number].dense_shape)
        if isinstance(gradients[number], tf.IndexedSlices)
        else next(rest)
        for number in numbers
    ]


def without_repeats(gradient: Any) -> Any:
    """The same gradient, with one row for each index, if it is `tf.IndexedSlices`."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _by_device(variables: Sequence[Any]) -> dict[str, list[int]]:
    """The positions of variables, by the device that they are on."""
    found: dict[str, list[int]] = {}
    for number, variable in enumerate(variables):
        found.setdefault(variable.device, []).append(number)
    return found


def _size(variable: Any) -> float:
    elements = variable.shape.num_elements()
    return float("inf") if elements is None else elements * variable.dtype.size
