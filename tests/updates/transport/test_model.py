"""Tests of the variables that a rule accepts, and of sums of repeated rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import Asynchronous
from coordinator.updates.model import Model
from tests.updates.descent import pushing_step, run


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


def rows(indices, values, count):
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([count, len(values[0])]))


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
    step = pushing_step(rule, [rows(indices, values, 6)])
    for _ in range(3):
        own_optimizer.apply([tf.constant(dense)], [here])
        assert run(strategy, step)
    np.testing.assert_allclose(there.numpy(), here.numpy(), rtol=1e-5, atol=1e-6)
    # Two rows of two numbers, and their indices; to the home server the version, the worker's index and whether all is
    # finite; to each server the learning rate, and the two scalars of a Keras optimizer.
    servers = len({there.value.device, rule.state.home})
    assert rule.statistics().bytes_pushed == 3 * (2 * 2 * 4 + 2 * 4 + 8 + 8 + 8 + servers * (4 + 8 + 4))


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
