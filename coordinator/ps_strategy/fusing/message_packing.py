r"""Rewrites a graph so that tensors that can be sent from one device to another at the same time use one message.

    ps 0    read a   read b                        ps 0    read a   read b
              |        |        two messages                  \ concat /         one message
    worker   use a    use b                       worker       split
                                                              /     \
                                                          use a     use b

The *stage* of an operation is the number of device changes on the longest path to the operation. A tensor is sent at
the last stage that delays none of its users. For example, the row indices of the next step's look-up are sent only with
this step's gradients, because the look-up waits for the update. Tensors for the same device at the same stage are
packed. If their dtypes differ, they are bitcast to words or bytes. Tensors that depend on an action of another worker
are packed only with tensors that depend on the same action.

Promises:
- The function's results, its effects on variables and the order of the effects do not change.
- No operation comes to depend on itself: stages never fall along an edge of the graph, and rise where the device
  changes. So a message contains only tensors of its stage or earlier stages, and its users have later stages.
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

from coordinator.ps_strategy.tensorflow_internals.functions import called_functions, replace_input

# Larger tensors are not packed, because copying such a tensor costs more than a message.
MAX_PACKED_BYTES = 2**20
# Represents the unknown device of operations, which TensorFlow places on the worker, or elsewhere at no cost.
_WORKER = ""
# TensorFlow places these operations with the users of their outputs.
_PLACED_WITH_USER = frozenset({"Const", "Shape", "ShapeN", "Size", "Rank"})
# The types that TensorFlow can bitcast to bytes.
PACKED_TYPES = frozenset(
    {
        *(tf.float16, tf.bfloat16, tf.float32, tf.float64),
        *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64),
    }
)

# Operations that may wait for another worker. Their outputs must not delay tensors for which that worker may wait. A
# loop may poll. A mutex is not in the list, because the holder of a mutex does not wait for others.
_WAITING = re.compile("Queue|Barrier|TakeGradient|Stage|Unstage|^While$")

# The type of `_constant` and of its cached form, which return a vector of integers on a device.
_Constant = Callable[..., Any]
_ConstantHere = Callable[[tuple[int, ...]], Any]


@dataclasses.dataclass
class _Sent:
    tensor: Any
    # A bit for each operation that the tensor depends on and that may wait for other workers.
    awaited: int
    # The number of the first section of the graph that uses the tensor.
    section: float = math.inf
    # The last stage at which sending the tensor delays no user.
    stage: float = math.inf
    # The operations on the target device that use the tensor, and the tensor's positions among their inputs.
    users: list[tuple[tf.Operation, int]] = dataclasses.field(default_factory=list)


def pack_transfers(graph: tf.Graph, devices: Mapping[str, str], sections: Sequence[str] = ()) -> int:
    """Packs the transfers of a graph; returns the number of messages with several tensors.

    Args:
      graph: the graph of a function that is being built, with all of its control dependencies.
      devices: maps the names of the placeholders of the resources among the graph's inputs to the resources' devices.
      sections: the name scopes of consecutive sections of the graph. Only tensors of the same or neighbouring sections
        are packed together: otherwise, the tensors of all sections could be in memory at the same time.
    """
    numbers = {name: number for number, name in enumerate(sections)}
    constant = functools.cache(_constant)
    with graph.as_default(), tf.control_dependencies(None):
        messages = list(_messages(graph, devices, numbers))
        for source, target, sent in messages:
            arrived = pack([transfer.tensor for transfer in sent], source or None, target or None, constant)
            for transfer, tensor in zip(sent, arrived, strict=True):
                for user, position in transfer.users:
                    replace_input(user, position, tensor)
    return len(messages)


def is_worth_packing(tensor: Any) -> bool:
    """Returns True if a tensor can be packed and may be small. Only the tensor's first dimension may be unknown."""
    shape = tensor.shape
    if tensor.dtype not in PACKED_TYPES:
        return False
    if shape.is_fully_defined():
        return bool(0 < shape.num_elements() * tensor.dtype.size <= MAX_PACKED_BYTES)
    return bool(shape.rank is not None and shape[1:].is_fully_defined() and shape[1:].num_elements())


def _messages(
    graph: tf.Graph, devices: Mapping[str, str], sections: Mapping[str, int]
) -> Iterator[tuple[str, str, list[_Sent]]]:
    ways: dict[tuple[str, str, float, int], list[_Sent]] = {}
    for (_, source, target), transfer in _sent(graph, devices, sections).items():
        ways.setdefault((source, target, transfer.stage, transfer.awaited), []).append(transfer)
    for (source, target, _, _), transfers in ways.items():
        yield from ((source, target, together) for together in _neighbours(transfers) if len(together) > 1)


def _sent(
    graph: tf.Graph, devices: Mapping[str, str], sections: Mapping[str, int]
) -> dict[tuple[str, str, str], _Sent]:
    places, stages, awaited = _places_stages_and_awaited(graph, devices)
    sent: dict[tuple[str, str, str], _Sent] = {}
    for operation in graph.get_operations():
        target = places[operation.name]
        for position, tensor in enumerate(operation.inputs):
            maker = tensor.op
            source = places[maker.name]
            if source == target or maker.type in _PLACED_WITH_USER:
                continue
            if is_worth_packing(tensor):
                transfer = sent.setdefault((tensor.name, source, target), _Sent(tensor, awaited[maker.name]))
                transfer.section = min(transfer.section, sections.get(operation.name.partition("/")[0], 0))
                transfer.stage = min(transfer.stage, stages[operation.name] - 1)
                transfer.users.append((operation, position))
    return sent


def _neighbours(sent: Sequence[_Sent]) -> Iterator[list[_Sent]]:
    """Groups the tensors of a section with the tensors of the next section."""
    together: list[_Sent] = []
    for transfer in sorted(sent, key=operator.attrgetter("section")):
        if together and transfer.section > together[0].section + 1:
            yield together
            together = []
        together.append(transfer)
    yield together


def _places_stages_and_awaited(
    graph: tf.Graph, devices: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, float], dict[str, int]]:
    """Returns for each operation its device (`_WORKER` if unknown), its stage, and the bits of `_Sent.awaited`."""
    places: dict[str, str] = {}
    stages: dict[str, float] = {}
    awaited: dict[str, int] = {}
    operations = {operation.name: operation for operation in graph.get_operations()}
    needed = {name: needed_by(operation) for name, operation in operations.items()}
    waiting = _waiting(graph)

    def is_moved(needed_name: str, name: str) -> bool:
        return places[needed_name] != places[name] and operations[needed_name].type not in _PLACED_WITH_USER

    # The graph's own order is not topological: an operation may come before its control dependencies.
    order = list(graphlib.TopologicalSorter(needed).static_order())
    for name in order:
        places[name] = _place(operations[name], devices, places)
        stages[name] = max((stages[other] + is_moved(other, name) for other in needed[name]), default=0)
        awaited[name] = functools.reduce(operator.or_, (awaited[other] for other in needed[name]), waiting.get(name, 0))
    latest: dict[str, float] = {}
    for name in reversed(order):
        if operations[name].type in ("Identity", "IdentityN"):
            # An identity takes no time: it may run as late as its users allow.
            stages[name] = latest.get(name, stages[name])
        for other in needed[name]:
            bound = stages[name] - is_moved(other, name)
            latest[other] = min(latest.get(other, bound), bound)
    return places, stages, awaited


def _waiting(graph: tf.Graph) -> dict[str, int]:
    """Returns a bit for each operation that may wait for other workers, itself or in a function that it calls."""
    definition = graph.as_graph_def()
    inner = {function.signature.name: function.node_def for function in definition.library.function}

    @functools.cache
    def may_wait_in(name: str) -> bool:
        return any(map(may_wait, inner.get(name, ())))

    def may_wait(node: Any) -> bool:
        return bool(_WAITING.search(node.op)) or any(may_wait_in(name) for _, name in called_functions(node))

    return {node.name: 1 << number for number, node in enumerate(filter(may_wait, definition.node))}


def needed_by(operation: tf.Operation) -> list[str]:
    """Returns the names of the operations that an operation waits for."""
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
    """Returns the device, or `_WORKER` for devices of workers and devices without a job."""
    spec = tf.DeviceSpec.from_string(device)
    return _WORKER if spec.job in (None, "worker") else spec.to_string()


def pack(
    tensors: Sequence[Any], source: str | None, target: str | None, constant: _Constant | None = None
) -> list[Any]:
    """Transfers tensors that are worth packing between devices in one message; returns the tensors on `target`.

    A `source` or `target` of None is the worker. `constant` creates vectors of integers on a device.
    """
    constant = constant or _constant
    if len(tensors) < 2:
        with tf.device(target):
            return [tf.identity(tensor) for tensor in tensors]
    known = [tensor for tensor in tensors if tensor.shape.is_fully_defined()]
    opens = [tensor for tensor in tensors if not tensor.shape.is_fully_defined()]
    # A single tensor of unknown size is the rest of the message. For several such tensors, a header has the sizes.
    has_header = len(opens) > 1
    unit = _unit({tensor.dtype for tensor in tensors} | ({tf.int32} if has_header else set()))
    sizes: Any = [tensor.shape.num_elements() * tensor.dtype.size // unit.size for tensor in known]
    header = len(opens) * tf.int32.size // unit.size
    here, there = functools.partial(constant, device=source), functools.partial(constant, device=target)
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

    Tensors of several dtypes are sent as integers, never as floats. The bits of most small integers are denormal
    floats, which TensorFlow's constant folding and its kernels may replace by zero.
    """
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return tf.uint8 if any(dtype.size % tf.int32.size for dtype in dtypes) else tf.int32


def _flat(tensor: Any, unit: tf.DType, constant: _ConstantHere) -> Any:
    if tensor.dtype.size > unit.size:
        tensor = tf.reshape(tensor, constant(_kept_shape(tensor.shape.rank + 2)))
    units = tensor if tensor.dtype == unit else tf.bitcast(tensor, unit)
    return units if units.shape.rank == 1 else tf.reshape(units, constant((-1,)))


def _like(part: Any, dtype: tf.DType, shape: tf.TensorShape, constant: _ConstantHere) -> Any:
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

    TensorFlow's arithmetic optimizer merges two consecutive Bitcasts: uint8 -> int64 -> int32 becomes uint8 -> int32,
    which fails when it runs. A Reshape between the Bitcasts prevents the merge, but the optimizer removes a Reshape
    that changes nothing. So the ranks differ: a tensor of rank n has rank n + 1 on arrival, and n + 2 before sending.
    """
    return (-1,) + (1,) * (rank - 1)


def _constant(numbers: tuple[int, ...], device: str | None) -> Any:
    with tf.device(device):
        return tf.constant(numbers, tf.int32, [len(numbers)])
