"""Tests of the variables that a rule accepts, and of sums of repeated rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.fusing.message_packing import MAX_PACKED_BYTES
from coordinator.ps_strategy.keras.internals.optimizers import variable_of, without_repeats
from coordinator.updates import Asynchronous
from coordinator.updates.gradients import flat, rebuilt
from coordinator.updates.model import Model
from tests.updates.descent import mostly_long

TIMEOUT = 120.0


@pytest.fixture
def variables(strategy):
    with strategy.scope():
        return [tf.Variable(tf.zeros([2]), name=f"number_{number}") for number in range(4)]


def test_a_model_groups_its_variables_by_server(variables):
    model = Model(variables, embeddings=[variables[2]])
    assert model.by_device.keys() == {variable.device for variable in variables}
    for device, numbers in model.by_device.items():
        assert all(variables[number].device == device for number in numbers)
    assert sorted(number for numbers in model.by_device.values() for number in numbers) == [0, 1, 2, 3]
    assert model.dense == (0, 1, 3)
    assert model.pulled_at_once() == [0, 1, 3]
    assert repr(model) == "<Model: 4 variables on 2 servers>"


def test_a_large_variable_is_not_pulled_ahead_of_its_use(strategy):
    with strategy.scope():
        variables = [tf.Variable(tf.zeros([MAX_PACKED_BYTES // 4 + more])) for more in (0, 1)]
    assert Model(variables).dense == (0, 1)
    assert Model(variables).pulled_at_once() == [0]


def test_keras_variables_are_unwrapped(strategy):
    with strategy.scope():
        variable = keras.Variable([1.0])
    assert variable_of(variable) is variable.value
    model = Model([variable], embeddings=[variable.value])
    assert model.variables == [variable.value]
    assert model.originals == [variable]
    assert model.embeddings == {0}


def test_no_variables_are_refused():
    with pytest.raises(ValueError, match="at least one variable"):
        Model([])


def test_a_repeated_variable_is_refused(strategy, variables):
    with pytest.raises(ValueError, match="is in the list of variables twice"):
        Model([variables[0], variables[1], variables[0]])
    with strategy.scope():
        variable = keras.Variable([1.0])
    with pytest.raises(ValueError, match="is in the list of variables twice"):
        Model([variable, variable.value])


def test_a_variable_that_is_on_no_server_is_refused(strategy, variables):
    with pytest.raises(ValueError, match=r"'mine:0' is on .*, not on a parameter server. Create it inside"):
        Model([variables[0], tf.Variable(1.0, name="mine")])


def test_an_embedding_must_be_among_the_variables(variables):
    with pytest.raises(ValueError, match="'number_3:0' is not among the rule's variables"):
        Model(variables[:3], embeddings=[variables[3]])


def rows(indices, values, count):
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([count, len(values[0])]))


def test_repeated_rows_are_summed():
    gradient = without_repeats(rows([3, 1, 3, 3], [[1.0, 2.0], [10.0, 20.0], [3.0, 4.0], [5.0, 6.0]], 5))
    np.testing.assert_array_equal(gradient.indices, [3, 1])
    np.testing.assert_array_equal(gradient.values, [[9.0, 12.0], [10.0, 20.0]])
    dense = tf.ones([2])
    assert without_repeats(dense) is dense


def test_rows_that_were_made_unique_are_not_compared_again():
    @tf.function
    def is_same(ids):
        unique, positions = tf.unique(ids)
        slices = tf.IndexedSlices(tf.ones([tf.size(unique), 2]), unique)
        of_positions = tf.IndexedSlices(tf.ones([tf.size(ids), 2]), positions)
        return without_repeats(slices) is slices, without_repeats(of_positions) is of_positions

    assert is_same(tf.constant([3, 1, 3])) == (True, False)


def test_gradients_are_flattened_and_rebuilt():
    gradients = {0: tf.ones([2]), 2: rows([1], [[1.0]], 3), 3: tf.zeros([])}
    tensors = flat(gradients)
    assert [tensor.shape.as_list() for tensor in tensors] == [[2], [1, 1], [1], []]
    again = rebuilt(gradients, [2 * tensor for tensor in tensors])
    assert list(again) == [0, 2, 3]
    dense, sparse, scalar = again.values()
    np.testing.assert_array_equal(tf.convert_to_tensor(dense), [2.0, 2.0])
    assert scalar == 0
    assert isinstance(sparse, tf.IndexedSlices)
    assert (sparse.values.numpy().tolist(), sparse.indices.numpy().tolist()) == ([[2.0]], [2])


def by_function(variable, gradient, rate):
    assert isinstance(gradient, tf.IndexedSlices)
    variable.scatter_sub(tf.IndexedSlices(rate * gradient.values, gradient.indices))


OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.5),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.5),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=1.0),
}


@pytest.mark.parametrize("name", mostly_long([*OPTIMIZERS, "function"], "Adagrad", "function"))
def test_gradients_of_repeated_rows_equal_their_dense_sum(strategy, name):
    initial = np.arange(12, dtype=np.float32).reshape(6, 2)
    indices, values = [4, 1, 4, 4], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [-7.0, 8.0]]
    dense = np.zeros([6, 2], np.float32)
    np.add.at(dense, indices, values)

    here = keras.Variable(initial)
    optimizer = OPTIMIZERS.get(name, OPTIMIZERS["SGD"])()
    optimizer.build([here])
    for _ in range(3):
        optimizer.apply([tf.constant(dense)], [here])

    with strategy.scope():
        there = tf.Variable(initial)
        given = (by_function, {"learning_rate": 0.5}) if name == "function" else (OPTIMIZERS[name](), {})
        rule = Asynchronous(given[0], [there], embeddings=[there], **given[1])

    @tf.function
    def step():
        with rule.pull() as version:
            gradient = rows(indices, values, 6)
        return rule.push([gradient], version)

    for _ in range(3):
        assert strategy.schedule(step).result(TIMEOUT)
    np.testing.assert_allclose(there.numpy(), here.numpy(), rtol=1e-5, atol=1e-6)
    # Two rows of two numbers, and their indices; to the home server the version, the worker's index and whether all is
    # finite; to each server the learning rate, and the two scalars of a Keras optimizer.
    servers = len({there.device, rule.state.home})
    known = 4 if name == "function" else 4 + 8 + 4
    assert rule.statistics().bytes_pushed == 3 * (2 * 2 * 4 + 2 * 4 + 8 + 8 + 8 + servers * known)


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
