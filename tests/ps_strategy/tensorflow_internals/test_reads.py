"""Tests of reads of variables that are replaced by copies, with private interfaces of TensorFlow."""

import pytest
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.shared_variable import (
    graph_around,
    is_within,
    read_variable,
    reads_not_replaced,
    reads_replaced,
)


class ConstantReader:
    """Answers reads with a tensor, and reads of rows from the variable if there is no tensor."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.requests = []
        self.rows = []

    def copy(self, *, may_make):
        self.requests.append(may_make)
        return self.tensor() if self.tensor else None

    def note_rows(self, rows):
        self.rows.append(rows)


def test_reads_are_replaced_in_the_scope_and_gradients_go_to_the_variable():
    variable = tf.Variable([1.0, 2.0])

    @tf.function
    def step():
        copy = tf.constant([10.0, 20.0])
        with reads_replaced([variable], [ConstantReader(lambda: copy)]):
            with tf.GradientTape(persistent=True) as tape:
                read = [variable.read_value(), variable.value(), variable + 0.0, tf.convert_to_tensor(variable)]
                rows = tf.gather(variable, [1]), variable.sparse_read([1]), variable.gather_nd([[1]])
                total = tf.add_n([tf.reduce_sum(each) for each in [*read, *rows]])
            with reads_not_replaced([variable]):
                own = variable + 0.0
            again = variable + 0.0
        return read, rows, own, again, variable + 0.0, tf.convert_to_tensor(tape.gradient(total, variable))

    read, rows, own, again, after, gradient = step()
    assert [each.numpy().tolist() for each in [*read, again]] == [[10.0, 20.0]] * 5
    assert [each.numpy().tolist() for each in rows] == [[20.0]] * 3
    assert [each.numpy().tolist() for each in (own, after)] == [[1.0, 2.0]] * 2
    assert gradient.numpy().tolist() == [4.0, 7.0]


def test_reads_use_the_variable_if_the_reader_has_no_copy():
    variable = tf.Variable([1.0, 2.0])
    reader = ConstantReader(None)
    with reads_replaced([variable], [reader]):
        assert variable.read_value().numpy().tolist() == [1.0, 2.0]
        rows = variable.sparse_read([1])
    assert rows.numpy().tolist() == [2.0]
    assert reader.requests == [True, False]
    assert reader.rows[0] is rows


def test_replaced_reads_do_not_nest_and_end_with_their_scope():
    variable = tf.Variable(1.0)
    before = set(vars(variable))
    with reads_replaced([variable], [ConstantReader(None)]):
        again = reads_replaced([tf.Variable(2.0), variable], [ConstantReader(None)] * 2)
        with pytest.raises(ValueError, match="pull cannot nest"), again:
            pass
        assert set(vars(variable)) > before
    assert set(vars(variable)) == before


def test_a_replaced_read_in_a_loop_has_its_gradient():
    variable = tf.Variable(3.0)

    @tf.function
    def step():
        copy = tf.constant(5.0)
        reader = ConstantReader(lambda: copy)
        with reads_replaced([variable], [reader]), tf.GradientTape() as tape:
            total = tf.constant(1.0)
            for _ in tf.range(3):
                total *= variable
        return total, tape.gradient(total, variable)

    assert [each.numpy() for each in step()] == [125.0, 75.0]


def test_read_variable_is_not_recorded_by_tapes():
    variable = tf.Variable(3.0)
    with reads_replaced([variable], [ConstantReader(lambda: tf.constant(5.0))]):
        with tf.GradientTape() as tape:
            value = read_variable(variable)
        assert value.numpy() == 3.0
        assert tape.gradient(value, variable) is None


def test_is_within_looks_through_branches_and_loops_but_not_functions():
    inside = {}

    def note(place, graph):
        inside[place] = is_within(graph)
        return tf.constant(0)

    @tf.function
    def inner(graph):
        return note("function", graph)

    @tf.function
    def outer():
        graph = tf.compat.v1.get_default_graph()
        note("itself", graph)
        inner(graph)
        tf.cond(tf.timestamp() > 0.0, lambda: note("branch", graph), lambda: note("other branch", graph))
        tf.while_loop(lambda _: note("condition", graph) > 0, lambda _: note("body", graph), [tf.constant(0)])
        assert graph_around(graph) is None

    outer()
    assert inside == {
        "itself": True,
        "function": False,
        "branch": True,
        "other branch": True,
        "condition": True,
        "body": True,
    }
