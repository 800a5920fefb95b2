"""A traced function's graph, changed so that tensors which go from one device to another at the same time go as one.

    ps 0    read a   read b                        ps 0    read a   read b
              |        |        two messages                  \\_ join _/         one message
    worker   use a    use b                       worker       split
                                                              /     \\
                                                          use a     use b

Which tensors go at the same time: the *stage* of an operation is how often what it depends on has changed device before
it. Tensors that leave a device at one stage for one other device are joined; as bytes, if they are of several types.

Promises:
- What the function computes does not change, nor what it does to variables, nor in which order.
- No operation comes to depend on itself. (Along an edge of the graph stages never fall, and they rise where the device
  changes. So what is joined at one stage cannot depend on what is split from it, which is of a later one.)
"""

import dataclasses
import graphlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

# A tensor that is larger than this, in bytes, goes alone: copying it would cost more than a message does.
LARGEST_PACKED = 2**20
# Where an operation is whose place is not known: on the worker, or wherever TensorFlow finds that it costs nothing.
_WORKER = ""
# TensorFlow puts what these give where it is used.
_PLACED_WITH_USER = frozenset({"Const", "Shape", "ShapeN", "Size", "Rank"})
# What TensorFlow can take for bytes.
_PACKED_TYPES = frozenset(
    {
        *(tf.float16, tf.bfloat16, tf.float32, tf.float64),
        *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64),
    }
)
# Of how many bytes something has.
_COUNT = tf.int32


@dataclasses.dataclass(frozen=True)
class _Way:
    """From where to where, and when."""

    source: str
    target: str
    stage: int


@dataclasses.dataclass(frozen=True)
class _Sent:
    """A tensor that goes some way, and the names of the operations that use it there."""

    tensor: Any
    users: list[str]

    @property
    def is_open(self) -> bool:
        """Whether its first dimension is known only when it is there."""
        return not self.tensor.shape.is_fully_defined()

    def count(self, unit: tf.DType) -> int:
        """How many of these it has, if it is not open."""
        return int(self.tensor.shape.num_elements() * self.tensor.dtype.size // unit.size)


def packed(graph: tf.Graph, devices: Mapping[str, str]) -> Any:
    """The definition of the graph so changed, a `GraphDef`.

    Args:
      graph: of a traced function.
      devices: where the resources are that it is given: devices, by the names of the operations that stand for them.
    """
    definition = graph.as_graph_def()
    nodes = {node.name: node for node in definition.node}
    for number, (way, sent) in enumerate(_ways(graph, devices)):
        arrived = _Junction(definition, f"packed_{number}", way, sent).send()
        for each, name in zip(sent, arrived, strict=True):
            for user in each.users:
                _pass_instead(nodes[user], _input_name(each.tensor), name)
    return definition


def _ways(graph: tf.Graph, devices: Mapping[str, str]) -> Iterator[tuple[_Way, list[_Sent]]]:
    """What goes each way by which more than one tensor goes."""
    places, stages = _places_and_stages(graph, devices)
    ways: dict[_Way, dict[str, _Sent]] = {}
    for operation in graph.get_operations():
        target = places[operation.name]
        for tensor in operation.inputs:
            source = places[tensor.op.name]
            if source != target and tensor.op.type not in _PLACED_WITH_USER and _may_be_packed(tensor):
                there = ways.setdefault(_Way(source, target, stages[tensor.op.name]), {})
                there.setdefault(tensor.name, _Sent(tensor, [])).users.append(operation.name)
    for way, there in ways.items():
        if len(there) > 1:
            yield way, list(there.values())


def _places_and_stages(graph: tf.Graph, devices: Mapping[str, str]) -> tuple[dict[str, str], dict[str, int]]:
    """Where each operation is, as far as that can be told, and how many changes of place come before it."""
    places: dict[str, str] = {}
    stages: dict[str, int] = {}
    for operation in _after_what_they_need(graph):
        place = places[operation.name] = _place(operation, devices, places)
        stages[operation.name] = max((stages[name] + (places[name] != place) for name in _needed(operation)), default=0)
    return places, stages


def _after_what_they_need(graph: tf.Graph) -> Iterator[tf.Operation]:
    """The operations, none before one that it needs; in their own order, one may wait for a later one."""
    operations = {operation.name: operation for operation in graph.get_operations()}
    needed = {name: _needed(operation) for name, operation in operations.items()}
    return map(operations.__getitem__, graphlib.TopologicalSorter(needed).static_order())


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


def is_worth_packing(tensor: Any) -> bool:
    """Whether a tensor's shape is known, but for the first dimension, and it is not known to be too large."""
    shape = tensor.shape
    if shape.rank is None:
        return False
    if shape.is_fully_defined():
        return bool(shape.num_elements() * tensor.dtype.size <= LARGEST_PACKED)
    return bool(shape[1:].is_fully_defined())


def _may_be_packed(tensor: Any) -> bool:
    # The length of what is empty cannot be told from its bytes.
    return tensor.dtype in _PACKED_TYPES and is_worth_packing(tensor) and 0 not in tensor.shape.as_list()


class _Junction:
    """The nodes that join tensors where they are, and split them where they are used.

    Args:
      definition: gets the nodes.
      name: what their names begin with.
      way: which way the tensors go.
      sent: the tensors.
    """

    def __init__(self, definition: Any, name: str, way: _Way, sent: Sequence[_Sent]) -> None:
        self._definition = definition
        self._name = name
        self._way = way
        self._sent = sent
        dtypes = {each.tensor.dtype for each in sent}
        self._opens = sum(each.is_open for each in sent)
        # The length of a single open one is what is left. Those of several, a header tells.
        self._has_header = self._opens > 1
        # What the message is a vector of.
        self._unit = tf.uint8 if self._has_header or len(dtypes) > 1 else dtypes.pop()
        self._constants = 0

    def send(self) -> list[str]:
        """Adds them; returns what the tensors are called where they arrive, in their order."""
        source = self._way.source
        in_order = sorted(self._sent, key=lambda each: each.is_open)
        parts = [self._flat(each.tensor, number) for number, each in enumerate(in_order)]
        sizes = [each.count(self._unit) for each in in_order if not each.is_open]
        if self._has_header:
            parts.insert(0, self._header(parts[len(sizes) :]))
            sizes.insert(0, self._opens * _COUNT.size)
        inputs = [*parts, self._constant(0, source)]
        joined = self._node("joined", "ConcatV2", inputs, source, N=len(parts), T=self._unit, Tidx=_COUNT)
        pieces = self._split(joined, sizes)[-len(in_order) :]
        arrived = {
            each.tensor.name: self._tensor(each.tensor, piece, number)
            for number, (each, piece) in enumerate(zip(in_order, pieces, strict=True))
        }
        return [arrived[each.tensor.name] for each in self._sent]

    def _header(self, opens: Sequence[str]) -> str:
        """How many bytes each open part has, as bytes."""
        there = self._way.source
        counts = [
            self._node(f"count_{number}", "Size", [part], there, T=tf.uint8, out_type=_COUNT)
            for number, part in enumerate(opens)
        ]
        together = self._node("counts", "Pack", counts, there, N=len(counts), T=_COUNT)
        header = self._node("header", "Bitcast", [together], there, T=_COUNT, type=tf.uint8)
        return self._reshaped("flat_header", header, [-1], there, tf.uint8)

    def _split(self, joined: str, sizes: Sequence[int]) -> list[str]:
        """The parts of a message where it has arrived: those of these sizes, then the open ones."""
        there, number = self._way.target, len(sizes) + self._opens
        if self._has_header:
            inputs = [self._constant(sizes, there), self._counts_there(joined), self._constant(0, there)]
            all_sizes = self._node("sizes", "ConcatV2", inputs, there, N=2, T=_COUNT, Tidx=_COUNT)
        else:
            all_sizes = self._constant([*sizes, *[-1] * self._opens], there)
        inputs = [joined, all_sizes, self._constant(0, there)]
        split = self._node("split", "SplitV", inputs, there, num_split=number, T=self._unit, Tlen=_COUNT)
        return [f"{split}:{place}" for place in range(number)]

    def _flat(self, tensor: Any, number: int) -> str:
        """A tensor as a vector of units, where it is."""
        there, dtype, name = self._way.source, tensor.dtype, _input_name(tensor)
        if dtype != self._unit:
            name = self._node(f"bytes_{number}", "Bitcast", [name], there, T=dtype, type=self._unit)
        return self._reshaped(f"flat_{number}", name, [-1], there, self._unit)

    def _tensor(self, tensor: Any, part: str, number: int) -> str:
        """A vector of units as the tensor that it was, where it has arrived."""
        there, dtype = self._way.target, tensor.dtype
        shape = [-1 if size is None else size for size in tensor.shape]
        if dtype.size > self._unit.size:
            shape.append(dtype.size)
        shaped = self._reshaped(f"arrived_{number}", part, shape, there, self._unit)
        if dtype == self._unit:
            return shaped
        return self._node(f"tensor_{number}", "Bitcast", [shaped], there, T=self._unit, type=dtype)

    def _counts_there(self, joined: str) -> str:
        """What the header of a message says, where it has arrived."""
        there, number = self._way.target, self._opens
        ends = [self._constant([end], there) for end in (0, number * _COUNT.size)]
        header = self._node("header_there", "Slice", [joined, *ends], there, T=tf.uint8, Index=_COUNT)
        rows = self._reshaped("rows", header, [number, _COUNT.size], there, tf.uint8)
        return self._node("counts_there", "Bitcast", [rows], there, T=tf.uint8, type=_COUNT)

    def _reshaped(self, name: str, tensor: str, shape: list[int], device: str, dtype: tf.DType) -> str:
        return self._node(name, "Reshape", [tensor, self._constant(shape, device)], device, T=dtype, Tshape=_COUNT)

    def _constant(self, value: Any, device: str) -> str:
        self._constants += 1
        tensor = tf.make_tensor_proto(value, _COUNT)
        return self._node(f"constant_{self._constants}", "Const", [], device, dtype=_COUNT, value=tensor)

    def _node(self, name: str, operation: str, inputs: list[str], device: str, **attributes: Any) -> str:
        node = self._definition.node.add(name=f"{self._name}/{name}", op=operation, input=inputs, device=device)
        for key, value in attributes.items():
            if isinstance(value, tf.DType):
                node.attr[key].type = value.as_datatype_enum
            elif isinstance(value, int):
                node.attr[key].i = value
            else:
                node.attr[key].tensor.CopyFrom(value)
        return str(node.name)


def _input_name(tensor: Any) -> str:
    """What a tensor is called among the inputs of a node."""
    return tensor.op.name if tensor.value_index == 0 else tensor.name


def _pass_instead(node: Any, former: str, present: str) -> None:
    for position, name in enumerate(node.input):
        if name == former:
            node.input[position] = present
