"""Tests of a model's variables, and of what is sent: unchanged, in few messages of a known size."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.fusing.message_packing import MAX_PACKED_BYTES
from coordinator.updates import Asynchronous
from coordinator.updates.gradient_optimizer import gradient_optimizer
from coordinator.updates.model import LocalModel, Model, transfer
from tests.updates.descent import descend, pushing_step, run


@pytest.fixture
def variables(strategy):
    with strategy.scope():
        return [tf.Variable(tf.zeros([2]), name=f"number_{number}") for number in range(4)]


def test_variables_that_cannot_be_trained_are_refused(strategy, variables):
    with strategy.scope():
        of_keras = keras.Variable([1.0])
    for given, embeddings, message in (
        ([], None, "at least one variable"),
        ([variables[0], variables[1], variables[0]], None, "is in the list of variables twice"),
        ([of_keras, of_keras.value], None, "is in the list of variables twice"),
        ([tf.Variable(1.0, name="mine")], None, r"'mine:0' is on .*, not on a parameter server. Create it inside"),
        (variables[:3], [variables[3]], "'number_3:0' is not among the rule's variables"),
    ):
        with pytest.raises(ValueError, match=message):
            Model(given, embeddings=embeddings)


def test_gradients_of_repeated_rows_equal_their_dense_sum(strategy):
    def new():
        return keras.Variable(np.arange(12, dtype=np.float32).reshape(6, 2)), keras.optimizers.Adagrad(0.5)

    indices, values = [4, 1, 4, 4], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [-7.0, 8.0]]
    dense = np.zeros([6, 2], np.float32)
    np.add.at(dense, indices, values)
    here, own_optimizer = new()
    with strategy.scope():
        there, optimizer = new()
        rule = Asynchronous(optimizer, [there], embeddings=[there])
    step = pushing_step(rule, [tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([6, 2]))])
    for _ in range(2):
        own_optimizer.apply([tf.constant(dense)], [here])
        assert run(strategy, step)
    np.testing.assert_allclose(there.numpy(), here.numpy(), rtol=1e-5, atol=1e-6)
    # Two rows of two numbers, and their indices; to the home server the version, the worker's index and whether all is
    # finite; to each server the learning rate, and the two scalars of a Keras optimizer.
    servers = len({there.value.device, rule.state.home})
    assert rule.statistics().bytes_pushed == 2 * (2 * 2 * 4 + 2 * 4 + 8 + 8 + 8 + servers * (4 + 8 + 4))


def test_reads_wait_for_the_version_of_all_servers_or_of_their_server(strategy):
    with strategy.scope():
        variables = [tf.Variable(1.0), tf.Variable(2.0)]
    assert variables[0].device != variables[1].device

    def waiting(only_on):
        @tf.function(autograph=False)
        def step(version):
            return Model(variables).pull(variables, [tf.identity(version, name="earlier")], only_on)

        operations = step.get_concrete_function(tf.constant(3, tf.int64)).graph.get_operations()
        reads = [operation for operation in operations if operation.type == "ReadVariableOp"]
        waited = [[other.name for other in read.control_inputs] for read in reads]
        return [read.device for read, names in zip(reads, waited, strict=True) if "earlier" in names]

    assert waiting(None) == [variable.device for variable in variables]
    assert waiting(variables[1].device) == [variables[1].device]


def test_variables_of_embedding_layers_and_sharded_ones_are_not_copied(strategy, caplog):
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((2,), dtype="int32"), keras.layers.Embedding(9, 3), keras.layers.Dense(1)]
        )
        kernel = tf.Variable(tf.zeros([1025, 256]), name="large")
        parts = Model([*model.trainable_variables, kernel])
        names = [parts.originals[number].name for number in sorted(parts.embeddings)]
        assert names == ["embeddings"]
        LocalModel(parts, gradient_optimizer(descend, parts.given, 1.0))
        [record] = [each for each in caplog.records if "has a copy of large" in each.message]
        assert "embeddings=" in record.message
        caplog.clear()
        LocalModel(Model([kernel], embeddings=()), gradient_optimizer(descend, [kernel], 1.0))
        assert not caplog.records


def sent(tensors, signature=None):
    """Transfers tensors in a function; returns the received tensors, the size in bytes, and the function's graph."""
    signature = signature or [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]

    @tf.function(autograph=False)
    def there(*given):
        arrived, size = transfer(given, "/device:CPU:0", None)
        for received, sent_tensor in zip(arrived, given, strict=True):
            assert received.dtype == sent_tensor.dtype
            assert received.shape.is_compatible_with(sent_tensor.shape)
            assert received.shape.rank == sent_tensor.shape.rank
        return arrived, size

    concrete = there.get_concrete_function(*signature)
    arrived, size = concrete(*tensors)
    assert size.dtype == tf.int64
    return arrived, int(size), concrete.graph


def messages(graph):
    """Returns the dtypes of the messages with several tensors."""
    return sorted(each.outputs[0].dtype.name for each in graph.get_operations() if each.type == "SplitV")


def assert_same(arrived, tensors):
    for received, sent_tensor in zip(arrived, tensors, strict=True):
        np.testing.assert_array_equal(received, sent_tensor)


def test_tensors_of_one_dtype_are_sent_in_one_message_also_if_a_dimension_is_unknown():
    tensors = [
        tf.constant([[1.0, 2.0], [3.0, 4.0]]),
        tf.constant([1, 2, 3], tf.int64),
        tf.constant(5.0),
        tf.constant([True, False]),
        tf.constant([[7], [8]], tf.int64),
        tf.constant([0.5, 1.5], tf.bfloat16),
        tf.zeros([2, 3, 1]),
    ]
    arrived, size, graph = sent(tensors)
    assert_same(arrived, tensors)
    assert size == 4 * (4 + 1 + 6) + 8 * (3 + 2) + 2 + 2 * 2
    assert messages(graph) == ["float32", "int64"]
    signature = [tf.TensorSpec([None, 3]), tf.TensorSpec([2]), tf.TensorSpec([None]), tf.TensorSpec([])]
    for rows in (0, 5):
        tensors = [tf.ones([rows, 3]), tf.range(2.0), tf.fill([rows], 2.0), tf.constant(4.0)]
        arrived, size, graph = sent(tensors, signature)
        assert_same(arrived, tensors)
        assert size == 4 * (3 * rows + 2 + rows + 1)
        # With a header of integers.
        assert messages(graph) == ["int32"]


def test_what_is_large_or_of_unknown_shape_and_strings_are_sent_separately():
    count = MAX_PACKED_BYTES // 4
    shapes = [[2, 3], [], [count + 1], [3], [count], [0], [3, 0], []]
    tensors = [tf.fill(shape, 2.0) for shape in shapes]
    tensors[1] = tf.constant(["a", "bc"])
    signature = [tf.TensorSpec(None), *(tf.TensorSpec(each.shape, each.dtype) for each in tensors[1:])]
    arrived, size, graph = sent(tensors, signature)
    assert_same(arrived, tensors)
    assert size == 4 * (6 + count + 1 + 3 + count + 1)
    [packed] = [each for each in graph.get_operations() if each.type == "ConcatV2"]
    assert packed.outputs[0].shape == [3 + count + 1]
    assert transfer([], None, None)[1] == 0
