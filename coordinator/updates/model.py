"""The variables that a rule updates, by parameter server, their transfer to and from the worker, and workers' copies.

This module packs transfers only in steps that may wait for other workers, in branches and loops too. In other
functions, `coordinator.ps_strategy.fusing.message_packing` packs transfers once the functions are fused, or have run
often. Packing these transfers twice would copy tensors twice.

With `transfer_dtype`, the sender casts a tensor and the receiver casts it back, so that messages have half the size.

    server   float32 variable -- cast --> 16 bits   ==>   16 bits -- cast --> float32   worker
    server   float32 sum    <-- cast -- 16 bits     <==   16 bits <-- cast -- float32   gradient

Only dense float32 tensors with at least one dimension are rounded. Scalars (learning rates, counts), other dtypes, the
rows of embeddings and `tf.IndexedSlices` stay exact.

With error feedback, a worker adds the rounding errors of its earlier pushes to each push:

    push n     sent  = rounded(gradient + error)
               error = gradient + error - sent

The sum of all that a worker has sent then differs from the sum of its gradients by at most the rounding error of the
last push. A new or restarted worker begins with zero errors; no checkpoint contains the errors. (Seide et al. 2014,
"1-Bit Stochastic Gradient Descent"; Karimireddy et al., arXiv 1901.09847.)

With some rules, each worker trains its own copy of the shared model (`LocalModel`, `AveragedModel`), with its own
optimizer. No checkpoint contains the copies: checkpoints save the model on the parameter servers.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.fusing.message_packing import MAX_PACKED_BYTES, is_worth_packing, pack
from coordinator.ps_strategy.keras.internals.optimizers import gradients_of_parts, parts_of, variable_of
from coordinator.ps_strategy.tensorflow_internals.handles import is_on_parameter_server
from coordinator.ps_strategy.tensorflow_internals.shared_variable import (
    ServerMutex,
    graph_around,
    is_within,
    operations_added,
    read_variable,
)
from coordinator.updates.gradient_optimizer import GradientOptimizer
from coordinator.updates.gradients import after_checks, flat, rebuilt
from coordinator.updates.rule_state import zeros

_logger = logging.getLogger("coordinator")


def is_rounded(tensor: Any) -> bool:
    """Returns True if a tensor, variable or gradient may be rounded: dense, float32, not a scalar."""
    return not isinstance(tensor, tf.IndexedSlices) and tensor.dtype == tf.float32 and tensor.shape.rank != 0


def rounded(tensor: Any, dtype: tf.DType | None) -> Any:
    """Rounds a tensor to a dtype, on its own device. Returns it unchanged if not `is_rounded`, or without a dtype."""
    return tf.cast(tensor, dtype) if dtype is not None and is_rounded(tensor) else tensor


def restored(gradient: Any, variable: Any) -> Any:
    """Returns a gradient in the dtype of its variable."""
    return gradient if gradient.dtype == variable.dtype else tf.cast(gradient, variable.dtype)


class Model:
    """A list of variables, by server. A sharded variable is the list of its parts.

    Embeddings, whose rows are looked up one by one, are never copied as a whole. By default, embeddings are the sharded
    variables and the variables of `Embedding` layers. `transfer_dtype` is the dtype of messages with dense variables
    and gradients; None for their own dtypes. `is_packed` is an argument of `transfer`.

    Raises:
      ValueError: no variable or an unlisted embedding is given, or a variable is given twice or on no parameter server.

    Attributes:
      given: the variables as given.
      wholes: the same variables as `tf.Variable`s.
      originals: `given`, with the parts in place of sharded variables.
      variables: `wholes`, with the parts in place of sharded variables. A *position* is an index into this list.
      embeddings: the positions of the embeddings.
      dense: the positions of the other variables.
      by_device: the positions of the variables on each server, by the name of its CPU.
      are_embeddings_given: whether the caller has named the embeddings.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        embeddings: Sequence[Any] | None = None,
        transfer_dtype: tf.DType | None = None,
        *,
        is_packed: bool = True,
    ) -> None:
        self.given = list(variables)
        self.transfer_dtype = transfer_dtype
        self._is_packed = is_packed
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
        # The positions of each whole variable's parts.
        self._positions: list[range] = []
        for variable in self.given:
            parts = parts_of(variable)
            self._positions.append(range(len(self.originals), len(self.originals) + len(parts)))
            self.originals += parts
        self.variables = [variable_of(variable) for variable in self.originals]
        self.are_embeddings_given = embeddings is not None
        if embeddings is None:
            # Keras gives this name to the variables of `Embedding` layers.
            named = [v for v in self.given if variable_of(v).name.rpartition("/")[2].partition(":")[0] == "embeddings"]
            embeddings = [*named, *(variable for variable in self.given if len(parts_of(variable)) > 1)]
        unknown = [variable for variable in map(variable_of, embeddings) if id(variable) not in wholes]
        if unknown:
            raise ValueError(f"The embedding {unknown[0].name!r} is not among the rule's variables.")
        self.embeddings = frozenset(
            position for embedding in embeddings for position in self._positions[wholes[id(variable_of(embedding))]]
        )
        self.dense = tuple(number for number in range(len(self.variables)) if number not in self.embeddings)
        self.by_device = _by_device(self.variables)

    def divided(self, gradients: Mapping[int, Any]) -> dict[int, Any]:
        """Converts gradients by the number of the whole variable to gradients by position."""
        return {
            position: part
            for number, gradient in gradients.items()
            for position, part in zip(
                self._positions[number], gradients_of_parts(gradient, self.wholes[number]), strict=True
            )
        }

    def send(
        self, device: str, gradients: Mapping[int, Any], extras: Sequence[Any]
    ) -> tuple[dict[int, Any], list[Any], Any]:
        """Sends the gradients of one server's variables, and the tensors `extras`, to that server.

        `gradients` has the gradients of all servers, by position. Returns this server's gradients, in the dtypes of
        their variables, the extras, and the size of all messages in bytes, an int64 scalar.
        """
        mine = {number: gradients[number] for number in self.by_device.get(device, ()) if number in gradients}
        tensors = flat(mine)
        arrived, size = transfer([*tensors, *extras], None, device, is_packed=self._is_packed)
        with tf.device(device):
            there = rebuilt(mine, arrived[: len(tensors)])
            restored_there = {number: restored(there[number], self.variables[number]) for number in there}
            return restored_there, arrived[len(tensors) :], size

    def pull(
        self, variables: Sequence[Any], after: Sequence[Any] = (), only_on: str | None = None
    ) -> tuple[list[Any], Any]:
        """Transfers the values of `tf.Variable`s on any server to the worker, in the dtypes of the variables.

        Reads on the device `only_on` (None: on all devices) wait for the tensors `after`. Returns the values, and the
        size of the messages in bytes, an int64 scalar.
        """
        values: dict[int, Any] = {}
        sizes = [tf.constant(0, tf.int64)]
        for device, numbers in _by_device(variables).items():
            awaited = list(after) if only_on in (None, device) else []
            with tf.device(device), tf.control_dependencies(awaited):
                read = [rounded(variables[number].read_value(), self.transfer_dtype) for number in numbers]
            arrived, size = transfer(read, device, None, is_packed=self._is_packed)
            with tf.device(None):
                for number, value in zip(numbers, arrived, strict=True):
                    values[number] = restored(value, variables[number])
            sizes.append(size)
        return [values[number] for number in range(len(variables))], tf.add_n(sizes)

    def joined(self, values: Mapping[int, Any]) -> list[Any]:
        """Joins values by position to the values of whole variables; None for a variable if a part has no value."""
        wholes = []
        for positions in self._positions:
            parts = [values.get(position) for position in positions]
            is_complete = all(part is not None for part in parts)
            wholes.append(None if not is_complete else parts[0] if len(parts) == 1 else tf.concat(parts, 0))
        return wholes

    def pulled_at_once(self, *, with_large: bool = False) -> list[int]:
        """Returns the positions of small variables that are no embeddings. They are pulled before they are read."""
        return [number for number in self.dense if with_large or not self.is_large(number)]

    def is_rounded(self, number: int) -> bool:
        """Returns whether the variable at a position, and its dense gradients, are rounded when they are sent."""
        return self.transfer_dtype is not None and number not in self.embeddings and is_rounded(self.variables[number])

    def rounded(self, gradients: Mapping[int, Any]) -> dict[int, Any]:
        """Returns gradients by position as they are sent, some of them in the dtype of messages."""
        return {
            number: rounded(gradient, self.transfer_dtype) if self.is_rounded(number) else gradient
            for number, gradient in gradients.items()
        }

    def transfer_dtypes(self) -> list[tf.DType | None]:
        """Returns the dtype of messages for each whole variable; None for its own dtype."""
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
    """Transfers tensors from one device to another; None is the worker.

    With `is_packed`, small tensors share a message if all dimensions but the first are known and, without `is_mixed`,
    they have the same dtype. Without `is_packed`, no tensor is available before all tensors are. Returns the tensors on
    the target device, in their order, and their size in bytes, an int64 scalar.
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
    """Returns the size in bytes of tensors on a device, an int64 scalar. Tensors of known shapes cost no message."""
    known = [tensor for tensor in tensors if tensor.shape.is_fully_defined()]
    sizes = [tf.constant(sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in known), tf.int64)]
    with tf.device(source):
        others = [
            tf.size(tensor, tf.int64) * tensor.dtype.size for tensor in tensors if not tensor.shape.is_fully_defined()
        ]
        if others:
            sizes.append(tf.add_n(others))
    return tf.add_n(sizes)


def _by_device(variables: Sequence[Any]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for number, variable in enumerate(variables):
        numbers.setdefault(variable.device, []).append(number)
    return numbers


class RoundingErrors:
    """The rounding errors of each worker. Created in the strategy's scope; used in scheduled functions.

    Without `are_kept`, gradients pass unchanged. With `are_kept`, a variable of unknown shape is a ValueError.
    """

    def __init__(self, model: Model, *, are_kept: bool) -> None:
        self._dtype = model.transfer_dtype
        numbers = [number for number in range(len(model.variables)) if are_kept and model.is_rounded(number)]
        for variable in (model.variables[number] for number in numbers):
            if not variable.shape.is_fully_defined():
                raise ValueError(
                    f"error_feedback needs variables of known shapes: that of {variable.name!r} is {variable.shape}. "
                    "Create it with one, or list it in embeddings=, which are not rounded."
                )
        with tf.variable_creator_scope(make_per_worker):
            self._errors = {
                number: zeros(model.variables[number].shape.as_list(), tf.float32, "rounding_error")
                for number in numbers
            }

    def added_to(self, gradients: Mapping[int, Any]) -> dict[int, Any]:
        """Returns the gradients, by position, plus the errors of this worker's earlier pushes."""
        return {
            number: gradient + self._errors[number].read_value() if self._is_kept(number, gradient) else gradient
            for number, gradient in gradients.items()
        }

    def keep(self, gradients: Mapping[int, Any], not_finite: Any, accepted: Any) -> None:
        """Stores the rounding errors of gradients from `added_to`, if `accepted` is True and `not_finite` is 0."""
        for number, gradient in gradients.items():
            if self._is_kept(number, gradient):
                lost = gradient - tf.cast(rounded(gradient, self._dtype), gradient.dtype)

                def assign(error: tf.Variable = self._errors[number], lost: Any = lost) -> Any:
                    error.assign(lost, read_value=False)
                    return tf.no_op()

                tf.cond(tf.logical_and(tf.equal(not_finite, 0), accepted), assign, tf.no_op)

    def _is_kept(self, number: int, gradient: Any) -> bool:
        return number in self._errors and is_rounded(gradient)


def make_per_worker(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    """Creates a variable with a separate value on each worker; for `tf.variable_creator_scope`."""
    return next_creator(**kwargs, per_worker_variable=True)


_NEEDED = "The version of a push must be the value of its rule.pull(), an int64 scalar;"
# Operations that are a function's arguments, or results of the functions that it calls.
_FROM_ELSEWHERE = ("Placeholder", "PartitionedCall", "StatefulPartitionedCall")


@dataclasses.dataclass(frozen=True)
class PulledModel:
    """The model that a step pulled. `_pull_model` sets the attributes before `worker`; `pull` and `push` the others.

    Attributes:
      version: an int64 scalar.
      scalars: the values of the optimizer's scalars.
      values: tensors on the worker, by the positions of their variables.
      size: the size of the transfer in bytes, an int64 scalar.
      pulls: the number of pulls: 1, or 0 if nothing was transferred; an int or an int64 scalar.
      rule_data: data for the rule's push; None if the pull was in another function.
      worker: the index of the worker, an int64 scalar.
      checks: operations on the worker that run before the push changes anything; see `after`.
      number: the number of the push's range, an int64 scalar; None without a range.
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
        tensors = (self.version, self.worker, *self.scalars)
        version, worker, *scalars = (after_checks(checks, tensor) for tensor in tensors)
        return dataclasses.replace(self, version=version, worker=worker, scalars=scalars, checks=checks)

    def values_of(self, gradients: Mapping[int, Any], variables: Sequence[Any]) -> dict[int, Any]:
        """Returns the values of variables with dense gradients, by position; ValueError if a value was not pulled."""
        dense = [number for number, gradient in gradients.items() if not isinstance(gradient, tf.IndexedSlices)]
        if missing := [variables[number].name for number in dense if number not in self.values]:
            raise ValueError(
                f"The rule sends pulled values with the gradients, and has none of {missing[0]}. Call rule.pull() and "
                "rule.push() in one function; a variable of embeddings= must have gradients of rows, tf.IndexedSlices."
            )
        return {number: after_checks(self.checks, self.values[number]) for number in dense}


def checked_version(version: Any) -> Any:
    """Converts the version of a push to a tensor; raises TypeError if the version is not an int64 scalar."""
    try:
        converted = tf.convert_to_tensor(version, tf.int64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{_NEEDED} got {version!r}.") from error
    if not converted.shape.is_compatible_with([]):
        raise TypeError(f"{_NEEDED} got one of shape {converted.shape}.")
    return converted


def latest_pull(key: str, version: Any) -> PulledModel | None:
    """Returns the last pull of the function that is being traced; None if the pull was in another function.

    `key` names the collection in which a graph stores its pulls. Raises ValueError if there is no pull, and the push's
    version comes neither from an argument of the function nor from another function.
    """
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if pulls := graph.get_collection_ref(key):
            pulled: PulledModel = pulls[-1]
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

    `reads_replaced` reads the copy instead of the variable, so that each read gives the same value even if the variable
    has changed. If `copy` is None, a look-up reads rows on the variable's server, and a read of the whole variable
    makes the copy. A `tf.function` called in the scope reads the variable itself, as it may be called elsewhere, too.

    Attributes:
      read_later: the tensors that were sent when a read created the copy, and the rows that were looked up.
    """

    def __init__(self, variable: Any, copy: Any, transfer_dtype: tf.DType | None = None) -> None:
        self.read_later: list[Any] = []
        self._variable = variable
        self._copy = copy
        self._transfer_dtype = transfer_dtype
        self._graph = tf.compat.v1.get_default_graph()

    def copy(self, *, may_make: bool) -> Any:
        """Returns the tensor to read instead of the variable; None to read the variable itself."""
        if not is_within(self._graph):
            return None
        if self._copy is None and may_make:
            # The copy is in the outer graph, so that all branches and loops share it.
            with self._graph.as_default(), tf.control_dependencies(None):
                self._copy = self._read()
        return self._copy

    def note_rows(self, rows: Any) -> None:
        """Records looked-up rows, except in a branch or a loop, whose tensors cannot be used outside."""
        if tf.compat.v1.get_default_graph() is self._graph:
            self.read_later.append(rows)

    def _read(self) -> Any:
        """Returns the variable's value on the worker, in its own dtype; gradient tapes do not record the read."""
        variable, dtype = self._variable, self._transfer_dtype
        if dtype is None or not is_rounded(variable):
            value = read_variable(variable)
            self.read_later.append(value)
            return value
        sent = []
        for part in parts_of(variable):
            with tf.device(part.device):
                sent.append(rounded(read_variable(part), dtype))
        self.read_later += sent
        with tf.device(None):
            values = [tf.cast(value, variable.dtype) for value in sent]
            return values[0] if len(values) == 1 else tf.concat(values, 0)


# More than the number of changes that a worker makes in one connection.
_CHANGES_OF_CONNECTION = 2**40


class LocalModel:
    """Per-worker copies of a model's variables, except its embeddings. Created in the strategy's scope.

    Scheduled functions read and change the copies of their own worker, without any transfer. On a new or restarted
    worker, all copies are zero. The rule fills the copies before they are read, and maintains `steps` and `version`.
    Each worker has an optimizer like the shared model's optimizer, with its own slots and count.

    Attributes:
      numbers: the positions of the copied variables in the model.
      variables: the copies, in that order: per-worker variables, each with the original's shape and dtype.
      steps: local steps since the copies were filled; a per-worker int64 scalar.
      version: the version of the shared model that the copies were filled from; a per-worker int64 scalar.
    """

    def __init__(self, model: Model, optimizer: GradientOptimizer) -> None:
        self.numbers = model.dense
        large = [model.variables[number].name for number in self.numbers if model.is_large(number)]
        if large and not model.are_embeddings_given:
            _logger.warning(
                "Each worker has a copy of %s, of more than 1 MB. If steps only look up rows there, pass it to the "
                "update rule in embeddings=. Otherwise pass embeddings= without it, and this is not reported.",
                ", ".join(large),
            )
        originals = [model.originals[number] for number in self.numbers]
        with tf.variable_creator_scope(make_per_worker):
            self.steps = zeros([], tf.int64, "local_steps")
            self.version = zeros([], tf.int64, "pulled_version")
            self.variables = [_copy_of(original) for original in originals]
            self._optimizer = optimizer.for_copies(originals, self.variables)
        self._by_number = dict(zip(self.numbers, self.variables, strict=True))

    def values(self) -> list[Any]:
        return [variable.read_value() for variable in self.variables]

    def assign(self, values: Sequence[Any]) -> None:
        """Replaces the copies; the optimizer's slots stay."""
        _assign(self.variables, values)

    def apply(self, gradients: Mapping[int, Any], rate: Any) -> None:
        """Updates the copies with the worker's optimizer. Gradients, by position, have no repeated rows."""
        if not gradients:
            return
        # Bias corrections need the worker's own count of updates, because the slots are its own, too.
        count = [variable.read_value() for variable in self._optimizer.scalars[:1]]
        variables = [self._by_number[number] for number in gradients]
        self._optimizer.apply(variables, list(gradients.values()), count, rate)
        self._optimizer.count()


class AveragedModel(LocalModel):
    """A worker's local model, and which of its changes are in the mean of all models.

        copies = base + changes since then    change: the change that is being added to the mean, under `number`

    A change is *handed over* when it is copied to `change`. The worker then tells the servers of the change until they
    have counted it, and only then hands over another change. So a change is counted once, even if a call is cut off.

    A mutex on each worker protects the copies from an abandoned call that still runs. If a call is cut off after it has
    changed a part of the model, the worker gives up the model, which then has no generation.

    Attributes:
      averaged_at: when the copies were last averaged or replaced, on the worker's clock, in seconds; a per-worker
        float64 scalar. `version` is the shared model's version at that time.
      number: the number of the last change that was handed over; a per-worker int64 scalar.
    """

    def __init__(self, model: Model, optimizer: GradientOptimizer, lock_name: str) -> None:
        super().__init__(model, optimizer)
        originals = [model.originals[number] for number in self.numbers]
        with tf.variable_creator_scope(make_per_worker):
            self.averaged_at = zeros([], tf.float64, "averaged_at")
            self.number = zeros([], tf.int64, "change_number")
            self._counted = zeros([], tf.int64, "counted_number")
            self._base = [_copy_of(original) for original in originals]
            wholes = [variable_of(original) for original in originals]
            dtypes = [whole.dtype if whole.dtype.size >= tf.float32.size else tf.float32 for whole in wholes]
            self._change = [zeros(whole.shape, dtype, "change") for whole, dtype in zip(wholes, dtypes, strict=True)]
            # The generation is 0 on a new or restarted worker; see `AveragingControl`.
            self._generation = zeros([], tf.int64, "generation")
        self._lock = ServerMutex(lock_name, "")

    def is_of(self, generation: Any) -> Any:
        """Returns whether the model is of this generation, a bool scalar."""
        return tf.equal(generation, self._generation.read_value())

    def read(self) -> list[Any]:
        """Reads the copies, under the mutex."""
        with self._lock.hold():
            return self.values()

    def replace(self, values: Sequence[Any], generation: Any) -> None:
        """Replaces the model's values, in the order of `numbers`, and its generation, an int64 scalar (0 for none)."""
        with self._changed([*values, generation], generation):
            self.assign(values)
            _assign(self._base, values)
            self._counted.assign(self.number.read_value(), read_value=False)

    def is_counted(self) -> Any:
        """Returns whether the servers have counted all changes that were handed over, a bool scalar."""
        return tf.equal(self.number.read_value(), self._counted.read_value())

    def hand_over(self, values: Sequence[Any], connection: Any) -> None:
        """Hands over the change from `base` to some values; `connection` is the number of the worker's connection."""
        with self._changed([*values, connection]):
            for change, value, base in zip(self._change, values, self._base, strict=True):
                change.assign(tf.cast(value, change.dtype) - tf.cast(base.read_value(), change.dtype), read_value=False)
            _assign(self._base, values)
            # The number is greater than the numbers of older connections, which a restarted worker does not know.
            first = connection * _CHANGES_OF_CONNECTION
            self.number.assign(1 + tf.maximum(first, self.number.read_value()), read_value=False)

    def change(self) -> list[Any]:
        """Reads the last change that was handed over, in the order of `numbers`, in at least 32 bits."""
        return [change.read_value() for change in self._change]

    def record_counted(self) -> None:
        """Records that the servers have counted the last change."""
        self._counted.assign(self.number.read_value(), read_value=False)

    def move(self, mean: Sequence[Any]) -> None:
        """Moves the model from `base` to the mean, and keeps the changes that were made since `base`."""
        with self._changed(mean):
            for variable, base, value in zip(self.variables, self._base, mean, strict=True):
                # The result is exactly the mean, unless the model has changed since `base`.
                variable.assign(value + (variable.read_value() - base.read_value()), read_value=False)
            _assign(self._base, mean)

    def train(self, gradients: Mapping[int, Any], rate: Any, after: Any) -> None:
        """Applies gradients, by position, with a learning rate, once the tensor `after` is available."""
        with self._lock.hold([*flat(gradients), rate, after]):
            self.apply(gradients, rate)

    def record_averaged(self, version: Any, now: Any) -> None:
        """Records that the model is part of the shared model of this version."""
        self.version.assign(version, read_value=False)
        self.averaged_at.assign(now, read_value=False)

    @contextlib.contextmanager
    def _changed(self, after: Sequence[Any], generation: Any = None) -> Iterator[None]:
        """Opens a scope for changes of the model, under the mutex. Until the scope ends, the model has no generation.

        After the scope, the model has `generation`; with None, the model keeps its former generation.
        """
        with self._lock.hold(after):
            generation = self._generation.read_value() if generation is None else generation
            with tf.control_dependencies([generation]):
                begun = self._generation.assign(tf.zeros([], tf.int64), read_value=False)
            with tf.control_dependencies([begun]), operations_added() as changes:
                yield
            with tf.control_dependencies(changes):
                self._generation.assign(generation, read_value=False)


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value, read_value=False)


def _copy_of(original: Any) -> tf.Variable:
    variable = variable_of(original)
    return tf.Variable(
        lambda: tf.zeros(variable.shape, variable.dtype),
        # An optimizer changes the copy, but gradients are taken with respect to the original.
        trainable=False,
        constraint=original.constraint,
        name=f"local_{variable.name.partition(':')[0].replace('/', '_')}",
    )
