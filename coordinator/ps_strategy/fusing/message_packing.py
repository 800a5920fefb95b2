"""A graph, changed so that tensors which can go from one device to another at the same time go as one.

    ps 0    read a   read b                        ps 0    read a   read b
              |        |        two messages                  \\_ join _/         one message
    worker   use a    use b                       worker       split
                                                              /     \\
                                                          use a     use b

When a tensor can go: the *stage* of an operation is how often what it depends on has changed device before it. A tensor
is sent at the last stage at which it makes none of its users later than it is anyway: what the next step looks up goes
with the gradients of this one, since its rows are read after they are changed. Tensors that leave a device at one stage
for one other device are joined; as words or bytes, if they are of several types. Not so a tensor that is there only
when another worker has done something, and one that is not.

Promises:
- What the function computes does not change, nor what it does to variables, nor in which order.
- No operation comes to depend on itself. (Along an edge of the graph stages never fall, and they rise where the device
  changes. So what is sent at one stage is of that stage or an earlier one, and all that depends on it is of a later.)
"""

import dataclasses
import functools
import graphlib
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy import tensorflow_internals

# A tensor that is larger than this, in bytes, goes alone: copying it would cost more than a message does.
LARGEST_PACKED = 2**20
# Where an operation is whose place is not known: on the worker, or wherever TensorFlow finds that it costs nothing.
_WORKER = ""
# TensorFlow puts what these give where it is used.
_PLACED_WITH_USER = frozenset({"Const", "Shape", "ShapeN", "Size", "Rank"})
# What TensorFlow can take for bytes.
PACKED_TYPES = frozenset(
    {
        *(tf.float16, tf.bfloat16, tf.float32, tf.float64),
        *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64),
    }
)

# Operations that may wait for what others do: what they give must hold nothing else up, since the others may wait for
# that. A loop may look for it again and again. A lock is none of them: who has it needs nobody else to let it go.
_WAITING = re.compile("Queue|Barrier|TakeGradient|Stage|Unstage|^While$")

# A vector of numbers on a device; the same one for the same.
_Constant = Callable[[tuple[int, ...], str | None], Any]


@dataclasses.dataclass
class _Sent:
    """A tensor that goes to a device, and the operations that use it there, by the positions of their inputs.

    Attributes:
      section: the number of the part of the graph that uses it first.
      stage: the last one at which it makes no user later.
      awaited: the operations that may wait for others, on which it depends; a bit for each.
    """

    tensor: Any
    awaited: int
    section: float = math.inf
    stage: float = math.inf
    users: list[tuple[tf.Operation, int]] = dataclasses.field(default_factory=list)


def pack_transfers(graph: tf.Graph, devices: Mapping[str, str], sections: Sequence[str] = ()) -> int:
    """Changes the graph so.

    Args:
      graph: of a function that is not made yet, with all control dependencies in it.
      devices: where the resources are that it is given: devices, by the names of the operations that stand for them.
      sections: the name scopes of parts that follow each other. Tensors of parts that are not neighbours are not
        joined: if nothing else orders the parts, all would have to be there at once.

    Returns:
      How many messages of several tensors there are now.
    """
    numbers = {name: number for number, name in enumerate(sections)}
    constant = functools.cache(_constant)
    with graph.as_default(), tf.control_dependencies(None):
        messages = list(_messages(graph, devices, numbers))
        for source, target, sent in messages:
            arrived = _send([each.tensor for each in sent], source or None, target or None, constant)
            for each, tensor in zip(sent, arrived, strict=True):
                for user, position in each.users:
                    tensorflow_internals.replace_input(user, position, tensor)
    return len(messages)


def is_worth_packing(tensor: Any) -> bool:
    """Whether it is small, or may be, as far as its shape tells; all of that but the first dimension must be known."""
    shape = tensor.shape
    if shape.is_fully_defined():
        return bool(0 < shape.num_elements() * tensor.dtype.size <= LARGEST_PACKED)
    return bool(shape.rank is not None and shape[1:].is_fully_defined() and shape[1:].num_elements())


def _messages(
    graph: tf.Graph, devices: Mapping[str, str], sections: Mapping[str, int]
) -> Iterator[tuple[str, str, list[_Sent]]]:
    """From where to where more than one tensor can go together, and which."""
    ways: dict[tuple[str, str, float, int], list[_Sent]] = {}
    for (_, source, target), each in _sent(graph, devices, sections).items():
        ways.setdefault((source, target, each.stage, each.awaited), []).append(each)
    for (source, target, _, _), there in ways.items():
        for together in _neighbours(there):
            if len(together) > 1:
                yield source, target, together


def _sent(
    graph: tf.Graph, devices: Mapping[str, str], sections: Mapping[str, int]
) -> dict[tuple[str, str, str], _Sent]:
    """What goes, by its name, from where and where to."""
    places, stages, awaited = _places_stages_and_awaited(graph, devices)
    sent: dict[tuple[str, str, str], _Sent] = {}
    for operation in graph.get_operations():
        target = places[operation.name]
        for position, tensor in enumerate(operation.inputs):
            maker = tensor.op
            source = places[maker.name]
            if source == target or maker.type in _PLACED_WITH_USER:
                continue
            if tensor.dtype in PACKED_TYPES and is_worth_packing(tensor):
                each = sent.setdefault((tensor.name, source, target), _Sent(tensor, awaited[maker.name]))
                each.section = min(each.section, sections.get(operation.name.partition("/")[0], 0))
                each.stage = min(each.stage, stages[operation.name] - 1)
                each.users.append((operation, position))
    return sent


def _neighbours(sent: Sequence[_Sent]) -> Iterator[list[_Sent]]:
    """Those of one section and of the next, together."""
    together: list[_Sent] = []
    for each in sorted(sent, key=lambda each: each.section):
        if together and each.section > together[0].section + 1:
            yield together
            together = []
        together.append(each)
    yield together


def _places_stages_and_awaited(
    graph: tf.Graph, devices: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, float], dict[str, int]]:
    """Where each operation is, as far as that can be told, at which stage, and what it or one before it waits for."""
    places: dict[str, str] = {}
    stages: dict[str, float] = {}
    awaited: dict[str, int] = {}
    operations = {operation.name: operation for operation in graph.get_operations()}
    needed = {name: _needed(operation) for name, operation in operations.items()}
    waiting = _waiting(graph)

    def is_moved(needed_name: str, name: str) -> bool:
        return places[needed_name] != places[name] and operations[needed_name].type not in _PLACED_WITH_USER

    # None before one that it needs; in the graph's own order one may wait for a later one.
    order = list(graphlib.TopologicalSorter(needed).static_order())
    for name in order:
        places[name] = _place(operations[name], devices, places)
        stages[name] = max((stages[other] + is_moved(other, name) for other in needed[name]), default=0)
        awaited[name] = functools.reduce(operator.or_, (awaited[other] for other in needed[name]), waiting.get(name, 0))
    latest: dict[str, float] = {}
    for name in reversed(order):
        if operations[name].type in ("Identity", "IdentityN"):
            # It takes no time, so that it may as well wait for what waits for it.
            stages[name] = latest.get(name, stages[name])
        for other in needed[name]:
            bound = stages[name] - is_moved(other, name)
            latest[other] = min(latest.get(other, bound), bound)
    return places, stages, awaited


def _waiting(graph: tf.Graph) -> dict[str, int]:
    """A bit for each operation that may wait for others, itself or in a function that it calls."""
    definition = graph.as_graph_def()
    inner = {function.signature.name: function.node_def for function in definition.library.function}

    @functools.cache
    def may_wait_in(name: str) -> bool:
        return any(map(may_wait, inner.get(name, ())))

    def may_wait(node: Any) -> bool:
        if _WAITING.search(node.op):
            return True
        called = (each for value in node.attr.values() for each in (value.func, *value.list.func))
        return any(may_wait_in(each.name) for each in called if each.name)

    return {node.name: 1 << number for number, node in enumerate(filter(may_wait, definition.node))}


def _needed(operation: tf.Operation) -> list[str]:
    return [tensor.op.name for tensor in operation.inputs] + [other.name for other in operation.control_inputs]


def _place(operation: tf.Operation, devices: Mapping[str, str], places: Mapping[str, str]) -> str:
    if operation.name in devices:
        return _server(devices[operation.name])
    if operation.device:
        return _server(operation.device)
    together = [group.decode().removeprefix("loc:@") for group in operation.colocation_groups()]
    together += [tensor.op.name for tensor in operation.inputs if tensor.dtype == tf.resource]
    return next((places[name] for name in together if places.get(name)), _WORKER)


def _server(device: str) -> str:
    """The device of a server that is not the worker; devices without a job are the worker's."""
    spec = tf.DeviceSpec.from_string(device)
    return _WORKER if spec.job in (None, "worker") else spec.to_string()


def _send(tensors: Sequence[Any], source: str | None, target: str | None, constant: _Constant) -> list[Any]:
    """Joins tensors where they are, and splits them where they are used.

    Args:
      tensors: at least two.
      source: the device that they are on; None is the worker.
      target: where they are used.
      constant: a vector of these numbers, on a device.

    Returns:
      The tensors as they have arrived.
    """
    known = [tensor for tensor in tensors if tensor.shape.is_fully_defined()]
    # Those whose first dimension is known only when they are there.
    opens = [tensor for tensor in tensors if not tensor.shape.is_fully_defined()]
    # Of one, that is what is left of the message; of several, the message tells their sizes in a header.
    has_header = len(opens) > 1
    unit = _unit({tensor.dtype for tensor in tensors} | ({tf.int32} if has_header else set()))
    sizes: Any = [tensor.shape.num_elements() * tensor.dtype.size // unit.size for tensor in known]
    header = len(opens) * tf.int32.size // unit.size
    here, there = functools.partial(_on, constant, source), functools.partial(_on, constant, target)
    with tf.device(source):
        parts = [_flat(tensor, unit, here) for tensor in (*known, *opens)]
        if has_header:
            counts = tf.stack([tf.size(part) for part in parts[len(known) :]])
            parts.insert(0, _flat(counts, unit, here))
        joined = tf.concat(parts, 0)
    with tf.device(target):
        if has_header:
            counts = _like(joined[:header], tf.int32, tf.TensorShape([len(opens)]), there)
            all_sizes = tf.concat([there((header, *sizes)), counts], 0)
            arrived = tf.split(joined, all_sizes, num=len(parts))[1:]
        else:
            all_sizes = there((*sizes, *[-1] * len(opens)))
            arrived = tf.split(joined, all_sizes, num=len(parts))
        by_name = {
            tensor.name: _like(part, tensor.dtype, tensor.shape, there)
            for tensor, part in zip((*known, *opens), arrived, strict=True)
        }
    return [by_name[tensor.name] for tensor in tensors]


def _unit(dtypes: set[tf.DType]) -> tf.DType:
    """Returns the dtype that tensors of these dtypes are bitcast to in one message.

    Tensors of several dtypes travel as integers, never as floats: most small integers are denormal numbers as floats,
    which TensorFlow's constant folding and its kernels may replace by zero.
    """
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return tf.uint8 if any(dtype.size % tf.int32.size for dtype in dtypes) else tf.int32


# Returns a vector of these numbers on the device that it was made for.
_ConstantHere = Callable[[tuple[int, ...]], Any]


def _flat(tensor: Any, unit: tf.DType, constant: _ConstantHere) -> Any:
    """Returns a tensor as a vector of units."""
    if tensor.dtype.size > unit.size:
        tensor = tf.reshape(tensor, constant(_kept_shape(tensor.shape.rank + 2)))
    units = tensor if tensor.dtype == unit else tf.bitcast(tensor, unit)
    return units if units.shape.rank == 1 else tf.reshape(units, constant((-1,)))


def _like(part: Any, dtype: tf.DType, shape: tf.TensorShape, constant: _ConstantHere) -> Any:
    """Returns a vector of units as a tensor of this dtype and shape."""
    ratio = dtype.size // part.dtype.size
    if ratio > 1:
        part = tf.reshape(part, constant((*_kept_shape(shape.rank + 1), ratio)))
    if part.dtype != dtype:
        part = tf.bitcast(part, dtype)
    if part.shape.rank == shape.rank == 1:
        part.set_shape(shape)
        return part
    return tf.reshape(part, constant(tuple(-1 if size is None else size for size in shape)))


def _kept_shape(rank: int) -> tuple[int, ...]:
    """Returns a shape for the side of a Bitcast on which the elements are larger.

    Of two Bitcast operations that follow each other TensorFlow's arithmetic optimizer makes one: of
    uint8 -> int64 -> int32 a uint8 -> int32, which fails when it runs. A Reshape keeps them apart, unless it is removed
    because it changes nothing. So the ranks differ: that of the tensor, one more where it arrives, two more where it is
    sent.
    """
    return (-1,) + (1,) * (rank - 1)


def _on(constant: _Constant, device: str | None, numbers: tuple[int, ...]) -> Any:
    return constant(numbers, device)


def _constant(numbers: tuple[int, ...], device: str | None) -> Any:
    with tf.device(device):
        return tf.constant(numbers, tf.int32, [len(numbers)])
