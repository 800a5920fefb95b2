"""Tensors that go from one device to another at the same time go as one, and nothing else changes."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.packed_transfers import LARGEST_PACKED, packed

SERVERS = [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(2)]


def messages(definition):
    """What goes from one device to another: pairs of devices, by the tensor and where it goes. "" is the worker."""
    nodes = {node.name: node for node in definition.node}
    return sorted(
        {
            (nodes[name.split(":")[0]].device, node.device, name)
            for node in nodes.values()
            for name in node.input
            if nodes[name.lstrip("^").split(":")[0]].device != node.device
            and nodes[name.lstrip("^").split(":")[0]].op not in ("Const", "Placeholder")
        }
    )


def ways(definition):
    return [(source, target) for source, target, _ in messages(definition)]


def results(definition, concrete, *args):
    """What it gives, run here."""
    here = type(definition)()
    here.CopyFrom(definition)
    for node in here.node:
        node.device = ""
    names = [tensor.name for tensor in concrete.inputs]

    @tf.function(autograph=False)
    def run(*given):
        outputs = [tensor.name for tensor in concrete.outputs]
        return tf.graph_util.import_graph_def(here, dict(zip(names, given, strict=True)), outputs, name="copy")

    return [tensor.numpy() for tensor in run(*map(tf.constant, args))]


def on(server, *tensors):
    """The tensors, made on a server."""
    with tf.device(SERVERS[server]):
        return [tensor + 1 for tensor in tensors]


def test_what_goes_one_way_at_the_same_time_is_one_message():
    @tf.function(autograph=False)
    def fn(x):
        a, b = on(0, x, 2 * x)
        c, d = on(1, 3 * x, x * x)
        e, f = on(0, a * c, b - d)
        return e + f

    concrete = fn.get_concrete_function(tf.TensorSpec([3]))
    assert len(messages(concrete.graph.as_graph_def())) == 11
    definition = packed(concrete.graph, {})
    first, second = SERVERS
    # Inputs are there, wherever they are needed; `x` is used by itself, too.
    assert ways(definition) == [
        ("", first),
        ("", first),
        ("", second),
        (first, ""),
        (first, ""),
        (second, ""),
    ]
    x = np.array([1, 2, 3], np.float32)
    expected = (x + 1) * (3 * x + 1) + 1 + (2 * x + 1) - (x * x + 1) + 1
    np.testing.assert_array_equal(results(definition, concrete, x), [expected])


def test_tensors_of_all_types_and_shapes_arrive_as_they_were():
    def values(rows):
        generator = np.random.default_rng(3)
        return [
            generator.normal(size=[2, 3]).astype(np.float32),
            generator.normal(size=[rows, 2]),
            generator.integers(-9, 9, [rows]),
            np.float16(2.5),
            generator.integers(0, 255, [5]).astype(np.uint8),
            generator.normal(size=[rows, 1, 2]).astype(np.float32),
            np.zeros([0], np.int32),
            generator.integers(-99, 99, [2, 1]).astype(np.int8),
            *[np.full([3], 7, dtype) for dtype in (np.int16, np.uint16, np.uint32, np.uint64)],
            generator.normal(size=[2]).astype(tf.bfloat16.as_numpy_dtype),
        ]

    opens = {1, 2, 5}

    @tf.function(autograph=False)
    def fn(*given):
        return [tf.identity(arrived) for arrived in on(0, *[value + 1 for value in given])]

    specs = [
        tf.TensorSpec([None, *value.shape[1:]] if number in opens else value.shape, value.dtype)
        for number, value in enumerate(values(4))
    ]
    concrete = fn.get_concrete_function(*specs)
    definition = packed(concrete.graph, {})
    assert ways(definition) == [("", SERVERS[0])] * 2 + [(SERVERS[0], "")] * 2, "the empty one goes alone"
    for rows in (4, 0, 1):
        given = values(rows)
        for found, value in zip(results(definition, concrete, *given), given, strict=True):
            np.testing.assert_array_equal(found, value + value.dtype.type(1) + value.dtype.type(1))
            assert found.dtype == value.dtype


@pytest.mark.parametrize("rows", [0, 5])
def test_one_of_unknown_length_needs_no_header(rows):
    @tf.function(autograph=False)
    def fn(x, y):
        return on(1, x + 1, y + 1)

    concrete = fn.get_concrete_function(tf.TensorSpec([2]), tf.TensorSpec([None, 2]))
    definition = packed(concrete.graph, {})
    assert ways(definition)[0] == ("", SERVERS[1])
    assert "Bitcast" not in {node.op for node in definition.node}
    x, y = np.ones([2], np.float32), np.ones([rows, 2], np.float32)
    for found, value in zip(results(definition, concrete, x, y), (x, y), strict=True):
        np.testing.assert_array_equal(found, value + 2)


def test_what_needs_what_arrived_goes_later():
    @tf.function(autograph=False)
    def fn(x):
        a, b = on(0, 2 * x, 3 * x)
        (c,) = on(0, a * b)
        (d,) = on(0, c + x)
        return [c * d, a, b]

    concrete = fn.get_concrete_function(tf.TensorSpec([], tf.int32))
    definition = packed(concrete.graph, {})
    assert results(definition, concrete, 5) == [177 * 183, 11, 16]


def test_what_waits_for_a_thing_on_another_server_goes_later():
    @tf.function(autograph=False)
    def fn(x):
        (a,) = on(0, 2 * x)
        with tf.control_dependencies([on(1, a * 3)[0]]):
            b = x * 5
        return [*on(0, b, x * 7), a]

    concrete = fn.get_concrete_function(tf.TensorSpec([], tf.int32))
    assert results(packed(concrete.graph, {}), concrete, 5) == [26, 36, 11]


def test_large_tensors_and_strings_go_alone():
    @tf.function(autograph=False)
    def fn(x):
        large = tf.fill([LARGEST_PACKED // 4 + 1], x)
        text = tf.strings.as_string(x)
        with tf.device(SERVERS[0]):
            return tf.reduce_sum(large) + x, text + "!"

    concrete = fn.get_concrete_function(tf.TensorSpec([], tf.int32))
    assert packed(concrete.graph, {}) == concrete.graph.as_graph_def()


def test_operations_are_where_the_resources_are_that_they_use():
    variables = [tf.Variable(1.0), tf.Variable(3.0)]

    @tf.function(autograph=False)
    def fn():
        first, second = (variable.read_value() for variable in variables)
        for variable in variables:
            variable.assign_sub(first * second)

    concrete = fn.get_concrete_function()
    devices = {tensor.op.name: SERVERS[1] for tensor in concrete.inputs}
    definition = packed(concrete.graph, devices)
    added = [node for node in definition.node if node.name.startswith("packed_")]
    assert [node.device for node in added if node.op == "ConcatV2"] == [SERVERS[1], ""]
    assert [node.device for node in added if node.op == "SplitV"] == ["", SERVERS[1]]
    assert packed(concrete.graph, {}) == concrete.graph.as_graph_def(), "all is in one place"
