"""Tests of reads of variables that are replaced by copies, with private interfaces of TensorFlow."""

import pytest
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.shared_variable import (
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
        return [*read, again], rows, [own, variable + 0.0], tf.convert_to_tensor(tape.gradient(total, variable))

    read, rows, outside, gradient = step()
    assert [each.numpy().tolist() for each in read] == [[10.0, 20.0]] * 5
    assert [each.numpy().tolist() for each in rows] == [[20.0]] * 3
    assert [each.numpy().tolist() for each in outside] == [[1.0, 2.0]] * 2
    assert gradient.numpy().tolist() == [4.0, 7.0]
    with reads_replaced([variable], [ConstantReader(lambda: tf.constant([5.0, 6.0]))]), tf.GradientTape() as tape:
        unrecorded = read_variable(variable)
    assert unrecorded.numpy().tolist() == [1.0, 2.0]
    assert tape.gradient(unrecorded, variable) is None


def test_reads_use_the_variable_if_the_reader_has_no_copy_and_scopes_do_not_nest():
    variable = tf.Variable([1.0, 2.0])
    reader, before = ConstantReader(None), set(vars(variable))
    with reads_replaced([variable], [reader]):
        assert variable.read_value().numpy().tolist() == [1.0, 2.0]
        rows = variable.sparse_read([1])
        again = reads_replaced([tf.Variable(2.0), variable], [ConstantReader(None)] * 2)
        with pytest.raises(ValueError, match="pull cannot nest"), again:
            pass
        assert set(vars(variable)) > before
    assert rows.numpy().tolist() == [2.0]
    assert reader.requests == [True, False]
    assert reader.rows[0] is rows
    assert set(vars(variable)) == before
