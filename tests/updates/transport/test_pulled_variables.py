"""Tests of reads during a pull: one copy of each variable, rows of embeddings, large variables."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.fusing.message_packing import MAX_PACKED_BYTES
from coordinator.ps_strategy.fusing.repeated_function import RepeatedFunction
from coordinator.updates.rule_state import pause
from tests.deadline import wait_until
from tests.updates.transport.pull_steps import TIMEOUT, new_rule, reads_of, result, traced


@pytest.fixture
def variables(strategy):
    with strategy.scope():
        return [tf.Variable(tf.fill([2], float(number))) for number in range(4)]


@pytest.fixture
def rule(strategy, variables):
    with strategy.scope():
        return new_rule(variables)


def test_reads_give_the_first_value_although_the_step_changes_the_variable(strategy, rule, variables):  # row 103
    @tf.function
    def step():
        with rule.pull():
            first = variables[1].read_value()
            variables[1].assign_add([10.0, 10.0])
            second = variables[1] + 0.0
            third = tf.convert_to_tensor(variables[1])
        return first, second, third, variables[1].read_value()

    for before in (1.0, 11.0):
        *inside, outside = result(strategy, step)
        for value in inside:
            np.testing.assert_array_equal(value, [before, before])
        np.testing.assert_array_equal(outside, [before + 10, before + 10])


def test_reads_give_the_first_value_although_others_change_the_variable(strategy, rule, variables):  # row 103
    with strategy.scope():
        has_begun, is_changed = tf.Variable(False), tf.Variable(False)

    @tf.function
    def step():
        with rule.pull():
            with tf.control_dependencies([variables[2].read_value()]):
                has_begun.assign(True)
            polls = 0
            while not is_changed:
                with tf.control_dependencies([pause(tf.constant(0.01, tf.float64))]):
                    polls += 1
            with tf.control_dependencies([polls]):
                inside = variables[2] + 0.0
        with tf.control_dependencies([inside]):
            return inside, variables[2].read_value()

    future = strategy.schedule(step)
    wait_until(has_begun.numpy)
    variables[2].assign([7.0, 7.0])
    is_changed.assign(True)
    inside, outside = future.result(TIMEOUT)
    np.testing.assert_array_equal(inside, [2.0, 2.0])
    np.testing.assert_array_equal(outside, [7.0, 7.0])


def test_pulls_do_not_nest_and_a_failed_one_leaves_nothing_behind(strategy, rule, variables):  # row 103
    @tf.function
    def nested():
        with rule.pull(), rule.pull():
            return variables[0].read_value()

    with pytest.raises(ValueError, match="pull cannot nest"):
        strategy.schedule(nested)

    @tf.function
    def failing():
        with rule.pull():
            raise KeyError("of the user's own")

    with pytest.raises(KeyError, match="of the user's own"):
        strategy.schedule(failing)
    assert not {"_read_variable_op", "sparse_read", "gather_nd"} & {name for v in variables for name in vars(v)}

    @tf.function
    def one_after_the_other():
        with rule.pull():
            first = variables[0] + 1.0
        with rule.pull():
            return first + variables[0]

    np.testing.assert_array_equal(result(strategy, one_after_the_other), [1.0, 1.0])


def loss_step(rule, variables):
    @tf.function
    def step(x):
        with rule.pull() as version:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum([tf.reduce_sum(v * v * x + v) for v in variables])
            gradients = tape.gradient(loss, variables)
        return rule.push(gradients, version), loss

    return step


def sent_by_servers(concrete):
    """Returns the tensors that leave a server. A read is on the server although its device is not set."""

    def leaves(tensor):
        on_server = "ps" in tensor.op.device and tensor.dtype != tf.resource
        return on_server and any("ps" not in after.device for after in tensor.consumers())

    return [tensor for each in concrete.graph.get_operations() for tensor in each.outputs if leaves(tensor)]


def test_a_fused_call_reads_each_variable_once_in_one_message_of_each_server(strategy, rule, variables):
    concrete = traced(strategy, loss_step(rule, variables), tf.constant(2.0))
    assert [reads_of(concrete, variable) for variable in variables] == [["ReadVariableOp"]] * 4
    twice = RepeatedFunction(concrete, 2, [True]).concrete
    sent = collections.Counter(tensor.op.device for tensor in sent_by_servers(twice))
    assert sent == dict.fromkeys({variable.device for variable in variables}, 2)


def test_loops_and_branches_read_the_same_copy_and_a_separate_function_the_variable(strategy, rule, variables):
    @tf.function
    def double():
        return 2.0 * variables[3]

    @tf.function
    def step(is_true):
        with rule.pull() as version, tf.GradientTape() as tape:
            variables[3].assign_add([100.0, 100.0])
            total = tf.zeros([2])
            for _ in tf.range(3):
                total += variables[3]
            total += tf.cond(is_true, lambda: variables[3] * 10.0, lambda: variables[1] * 10.0)
            total += double()
        return total, tape.gradient(total, [variables[3], variables[1]]), version

    total, gradients, _ = result(strategy, step, tf.constant(True))
    np.testing.assert_allclose(total, [3 * 3.0 + 30.0 + 2 * 103.0] * 2)
    np.testing.assert_allclose(gradients[0], [15.0, 15.0])
    np.testing.assert_allclose(gradients[1], [0.0, 0.0])
    total, gradients, _ = result(strategy, step, tf.constant(False))
    np.testing.assert_allclose(total, [3 * 103.0 + 10.0 + 2 * 203.0] * 2)
    np.testing.assert_allclose(gradients[1], [10.0, 10.0])


def test_a_layer_of_mixed_precision_has_the_same_gradients_as_without_a_pull(strategy):
    with strategy.scope():
        layer = keras.layers.Dense(3, dtype="mixed_bfloat16")
        layer.build((None, 5, 3))
        trained = [variable.value for variable in layer.trainable_variables]
        rule = new_rule(layer.trainable_variables)

    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(layer(x), tf.float32) ** 2)
        return loss, tape.gradient(loss, trained)

    @tf.function
    def step(x):
        with rule.pull() as version:
            inside = gradients(x)
        usual = gradients(x)
        return inside, usual, rule.push(inside[1], version)

    inside, usual, _ = result(strategy, step, tf.random.stateless_normal([2, 5, 3], (1, 2)))
    for found, other in zip(tf.nest.flatten(inside), tf.nest.flatten(usual), strict=True):
        assert np.any(found)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-6)


def test_rows_of_an_embedding_are_looked_up_and_changed_without_reading_the_rest(strategy):
    initial = np.arange(20.0, dtype=np.float32).reshape(10, 2)
    with strategy.scope():
        layer = keras.layers.Embedding(10, 2, weights=initial)
        table, dense = layer.embeddings.value, tf.Variable([1.0, 1.0])
        rule = new_rule([table, dense], embeddings=[table])

    @tf.function
    def step(ids):
        with rule.pull() as version:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) * dense) + tf.reduce_sum(layer(ids))
            gradients = tape.gradient(loss, [table, dense])
        assert isinstance(gradients[0], tf.IndexedSlices)
        return rule.push(gradients, version), loss

    ids = tf.constant([1, 3, 3])
    assert set(reads_of(traced(strategy, step, ids), table)) == {"ResourceGather"}
    _, loss = result(strategy, step, ids)
    assert loss == 2 * (2 + 3 + 2 * (6 + 7))
    initial[1] -= 2 * 0.5
    initial[3] -= 4 * 0.5
    np.testing.assert_allclose(table.numpy(), initial)
    # The dense variable, and three rows for each of both lookups.
    assert rule.statistics().bytes_pulled == 4 * 2 + 2 * 3 * 2 * 4
    np.testing.assert_allclose(dense.numpy(), [1 - 0.5 * (2 + 6 + 6), 1 - 0.5 * (3 + 7 + 7)])


def test_rows_of_a_copied_variable_come_from_its_copy(strategy):
    with strategy.scope():
        table = tf.Variable(tf.reshape(tf.range(20.0), [10, 2]))
        rule = new_rule([table])

    @tf.function
    def step(ids):
        with rule.pull(), tf.GradientTape() as tape:
            table.assign_add(tf.ones([10, 2]))
            rows, elements = tf.nn.embedding_lookup(table, ids), tf.gather_nd(table, [[3, 1]])
            loss = tf.reduce_sum(rows) + tf.reduce_sum(elements)
        return rows, elements, tf.convert_to_tensor(tape.gradient(loss, table))

    ids = tf.constant([1, 3])
    assert reads_of(traced(strategy, step, ids), table) == ["ReadVariableOp"]
    rows, elements, gradient = result(strategy, step, ids)
    np.testing.assert_array_equal(rows, [[2.0, 3.0], [6.0, 7.0]])
    np.testing.assert_array_equal(elements, [7.0])
    expected = np.zeros([10, 2])
    expected[1], expected[3] = [1, 1], [1, 2]
    np.testing.assert_array_equal(gradient, expected)


def test_a_large_variable_is_read_only_when_it_is_used(strategy):
    with strategy.scope():
        large = tf.Variable(tf.ones([MAX_PACKED_BYTES // 4 + 1]))
        small = tf.Variable(1.0)
        rule = new_rule([large, small])

    @tf.function
    def without():
        with rule.pull():
            return small.read_value()

    @tf.function
    def using():
        with rule.pull(), tf.GradientTape() as tape:
            total = tf.zeros([])
            for _ in tf.range(2):
                total += tf.reduce_sum(large)
            loss = total + tf.reduce_sum(large) + small
        return loss, tf.reduce_sum(tape.gradient(loss, large))

    with pytest.raises(ValueError, match="not enough values"):
        reads_of(traced(strategy, without), large)
    assert reads_of(traced(strategy, using), large) == ["ReadVariableOp"]
    size = large.shape[0]
    assert result(strategy, using) == (3 * size + 1, 3 * size)
    assert rule.statistics().bytes_pulled == 4 * (size + 1)
