"""Tests that tensors which can be sent between two devices at the same time are one message, and arrive bit for bit."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.fusing.message_packing import MAX_PACKED_BYTES, pack_transfers
from coordinator.ps_strategy.tensorflow_internals.functions import built_function
from coordinator.ps_strategy.tensorflow_internals.handles import copy_handle_data
from tests.ps_strategy.fusing.fused_calls import COUNT, FusedCalls


def results(concrete: Any, *args: Any) -> list[Any]:
    """Returns the results of a concrete function, as NumPy values."""
    here = concrete.graph.as_graph_def()
    for node in here.node:
        node.device = ""
    names = [tensor.name for tensor in concrete.inputs]

    @tf.function(autograph=False)
    def run(*given: Any) -> Any:
        outputs = [tensor.name for tensor in concrete.outputs]
        return tf.graph_util.import_graph_def(here, dict(zip(names, given, strict=True)), outputs, name="copy")

    given = [tf.constant(value, tensor.dtype) for value, tensor in zip(args, concrete.inputs, strict=True)]
    return [tensor.numpy() for tensor in run(*given)]


SERVERS = [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(2)]


def built(function, *signature, is_packed=True, devices=None, sections=()):
    """Returns the concrete function, with or without packed transfers."""

    def change(graph):
        if is_packed:
            given = {tensor.op.name: device for tensor, device in zip(graph.inputs, devices or [], strict=False)}
            pack_transfers(graph, given, sections)

    return built_function(function, signature, change)


def messages(concrete):
    """Returns the transfers as (source device, target device, tensor); the device "" is the worker."""
    nodes = {node.name: node for node in concrete.graph.as_graph_def().node}
    return sorted(
        {
            (nodes[name.lstrip("^").split(":")[0]].device, node.device, name)
            for node in nodes.values()
            for name in node.input
            if nodes[name.lstrip("^").split(":")[0]].device != node.device
            and nodes[name.lstrip("^").split(":")[0]].op not in ("Const", "Placeholder")
        }
    )


def directions(concrete):
    return [(source, target) for source, target, _ in messages(concrete)]


def on(server, *tensors):
    """Computes tensors on a server."""
    with tf.device(SERVERS[server]):
        return [tensor + 1 for tensor in tensors]


def test_tensors_of_one_stage_and_direction_form_one_message():
    def fn(x):
        a, b = on(0, x, 2 * x)
        c, d = on(1, 3 * x, x * x)
        e, f = on(0, a * c, b - d)
        return [e + f]

    signature = tf.TensorSpec([3])
    assert len(messages(built(fn, signature, is_packed=False))) == 11
    concrete = built(fn, signature)
    first, second = SERVERS
    # Inputs are available wherever they are needed; `x` is also used separately.
    assert directions(concrete) == [
        *[("", first)] * 2,
        ("", second),
        *[(first, "")] * 2,
        (second, ""),
    ]
    x = np.array([1, 2, 3], np.float32)
    expected = (x + 1) * (3 * x + 1) + 1 + (2 * x + 1) - (x * x + 1) + 1
    np.testing.assert_array_equal(results(concrete, x), [expected])


def test_a_tensor_that_waits_for_another_server_is_in_a_later_message():
    def fn(x):
        (a,) = on(0, 2 * x)
        with tf.control_dependencies([on(1, a * 3)[0]]):
            b = x * 5
        return [*on(0, b, x * 7), a]

    assert results(built(fn, tf.TensorSpec([], tf.int32)), 5) == [26, 36, 11]


def dequeued(_):
    queue = tf.raw_ops.FIFOQueueV2(component_types=[tf.int32], shapes=[[]])
    return tf.ensure_shape(tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int32])[0], [])


def polled(x):
    return tf.while_loop(lambda i: i < 3, lambda i: i + tf.cast(tf.timestamp() > 0, tf.int32), [x])[0]


@pytest.mark.parametrize(("wait", "is_inside"), [(dequeued, True), (polled, False)])
def test_operations_that_may_block_do_not_delay_other_messages(wait, is_inside):
    def fn(x):
        a, b, c = on(0, 2 * x, 3 * x, 5 * x)
        with tf.device(SERVERS[0]):
            awaited = tf.function(wait)(x) if is_inside else wait(x)
            after = [awaited + 1, awaited + 2]
        return [a + b + c + x, after[0] + after[1] + x]

    def back(concrete):
        nodes = {node.name: node for node in concrete.graph.as_graph_def().node}
        sent = [nodes[name.lstrip("^")] for source, _, name in messages(concrete) if source == SERVERS[0]]
        return sorted(len(node.input) - 1 for node in sent if node.op == "ConcatV2")

    concrete = built(fn, tf.TensorSpec([], tf.int32))
    assert back(concrete) == [2, 3], "one message of operations that wait, and one of those that do not"


def test_large_tensors_and_strings_are_sent_separately():
    def fn(x):
        large = tf.fill([MAX_PACKED_BYTES // 4 + 1], x)
        text = tf.strings.as_string(x)
        with tf.device(SERVERS[0]):
            return [tf.reduce_sum(large) + x, text + "!"]

    signature = tf.TensorSpec([], tf.int32)
    assert messages(built(fn, signature)) == messages(built(fn, signature, is_packed=False))


def test_operations_are_on_the_devices_of_their_resources():
    variables = [tf.Variable(1.0), tf.Variable(3.0)]

    def fn(*handles):
        for handle, variable in zip(handles, variables, strict=True):
            copy_handle_data(variable.handle, handle)
        first, second = (tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32) for handle in handles)
        for handle in handles:
            tf.raw_ops.AssignSubVariableOp(resource=handle, value=first * second)
        return [tf.identity(first - second)]

    signature = [tf.TensorSpec([], tf.resource)] * 2

    def added(devices):
        concrete = built(fn, *signature, devices=devices)
        operations = concrete.graph.get_operations()
        return [(each.type, each.device) for each in operations if each.type in ("ConcatV2", "SplitV")]

    there, here = SERVERS[1], ""
    assert added([there] * 2) == [("ConcatV2", there), ("SplitV", here), ("ConcatV2", here), ("SplitV", there)]
    assert not added([]), "all operations are on one device"


_RARE = [tf.qint8, tf.quint16, tf.qint32, *map(tf.as_dtype, ["float8_e5m2", "int4"])]
_INTEGERS = [tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64]
_OTHERS = [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.bool, tf.complex64, tf.complex128, tf.string]
DTYPES = [*_INTEGERS, *_OTHERS, *_RARE]
SHAPES = [(), (3,), (0, 2)]


def random_value(rng, dtype, shape):
    """Numbers of any bits, such as denormal floats and NaNs with a payload; small ones of the rare types."""
    count = int(np.prod(shape))
    if dtype is tf.string:
        return np.array([rng.bytes(int(size)) for size in rng.integers(0, 9, count)], object).reshape(shape)
    if dtype is tf.bool or dtype in _RARE:
        return rng.integers(0, 2 if dtype is tf.bool else 7, shape).astype(np.int8).astype(dtype.as_numpy_dtype)
    return np.frombuffer(rng.bytes(count * dtype.size), np.uint8).view(dtype.as_numpy_dtype).reshape(shape)


def bits(value):
    """Returns a key that is equal for two values if all their bits are."""
    array = value if isinstance(value, np.ndarray) else np.array(value, object if isinstance(value, bytes) else None)
    return repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()


@pytest.mark.parametrize(
    "dtypes",
    [
        pytest.param(DTYPES, id="all", marks=pytest.mark.long),
        pytest.param([tf.int32, tf.int64, tf.float32, tf.float64], id="of whole words"),
    ],
)
def test_packed_tensors_of_every_dtype_keep_their_bits(dtypes):
    rng = np.random.default_rng(0)
    values = [(dtype, random_value(rng, dtype, shape)) for dtype in dtypes for shape in SHAPES]

    def fn(*given):
        # Some are arguments, others constants, which are folded; each goes to a server, and on to another or back.
        for server in (0, 1):
            constants = [tf.constant(value, dtype) for dtype, value in values]
            with tf.device(SERVERS[server]):
                given = [*map(tf.identity, given[: len(values)]), *map(tf.identity, constants)]
        return [tf.identity(each) for each in given]

    signature = [tf.TensorSpec([None, *value.shape[1:]] if value.shape else [], dtype) for dtype, value in values]
    graphs = [built(fn, *signature, is_packed=is_packed) for is_packed in (True, False)]
    assert len(messages(graphs[0])) < 0.6 * len(messages(graphs[1]))
    fed = [value for _, value in values]
    found, expected = ([bits(value) for value in results(graph, *fed)] for graph in graphs)
    assert found == expected == 2 * [bits(value) for value in fed]


def test_arguments_and_results_of_fused_calls_keep_their_bits(strategy, monkeypatch):
    calls, rng = FusedCalls(strategy, monkeypatch), np.random.default_rng(5)
    kinds = [(dtype, shape) for dtype in (tf.int8, tf.float32, tf.bool, tf.string, tf.bfloat16) for shape in SHAPES]
    values = [[random_value(rng, *kind) for kind in kinds] for _ in range(COUNT)]
    step = tf.function(lambda *given: [tf.identity(value) for value in given], autograph=False)
    futures = calls.run(step, [[*map(tf.constant, given, [kind[0] for kind in kinds])] for given in values])
    for future, given in zip(futures, values, strict=True):
        assert [bits(found) for found in future.result()] == [bits(value) for value in given]
