"""Tests that a sharded variable has the value of one variable: read, sliced, calculated with and assigned to."""

import numpy as np
import pytest
import tensorflow as tf

TIMEOUT = 120.0
VALUE = np.arange(30, dtype=np.float32).reshape(10, 3) - 7.0

SLICES = {
    "a row": np.s_[3],
    "a row from the end": np.s_[-1],
    "an element": np.s_[7, 1],
    "rows": np.s_[2:7],
    "rows within a part": np.s_[1:3],
    "no rows": np.s_[7:2],
    "every third": np.s_[1::3],
    "backwards": np.s_[::-1],
    "backwards from one to another": np.s_[8:1:-3],
    "from the end": np.s_[-4:-1],
    "beyond the end": np.s_[6:100],
    "columns": np.s_[:, 1:],
    "rows and columns": np.s_[2:9:2, ::-1],
    "an ellipsis": np.s_[..., 1],
    "rows and an ellipsis": np.s_[4:, ...],
    "a new axis": np.s_[np.newaxis, 2:4],
    "a new axis at the end": np.s_[5, ..., np.newaxis],
    "all": np.s_[:],
}


@pytest.fixture(scope="module")
def table(sharded):
    return sharded(VALUE, parts=3, name="table")


def test_it_is_a_variable_of_the_full_shape(table):
    assert isinstance(table, tf.Variable)
    assert table.name.partition(":")[0] == "table"
    assert table.shape == (10, 3)
    assert table.dtype == tf.float32
    assert table.trainable
    assert [part.shape.as_list() for part in table.variables] == [[4, 3], [3, 3], [3, 3]]
    assert [part.name.partition(":")[0] for part in table.variables] == [f"table/part_{number}" for number in range(3)]
    assert bool(table.is_initialized())
    assert "table" in repr(table)
    assert "10, 3" in repr(table)


def test_its_value_is_that_of_its_parts_one_after_the_other(table):
    ways = (
        table.numpy(),
        table.read_value(),
        table.value(),
        tf.convert_to_tensor(table),
        tf.identity(table),
        np.asarray(table),
    )
    for value in (*ways, np.concatenate([part.numpy() for part in table.variables])):
        np.testing.assert_array_equal(value, VALUE)


def test_slices_are_those_of_an_array(strategy, table):
    @tf.function
    def step():
        return {name: table[key] for name, key in SLICES.items()}

    for found in ({name: table[key] for name, key in SLICES.items()}, strategy.schedule(step).result(TIMEOUT)):
        for name, key in SLICES.items():
            np.testing.assert_array_equal(found[name], VALUE[key], err_msg=name)


def test_a_tensor_or_a_mask_may_be_an_index(table):
    np.testing.assert_array_equal(table[tf.constant(7)], VALUE[7])
    np.testing.assert_array_equal(table[tf.constant(2) : tf.constant(8)], VALUE[2:8])
    mask = VALUE[:, 0] % 2 == 0
    np.testing.assert_array_equal(table[mask], VALUE[mask])


def test_operators_are_those_of_a_tensor(table):
    tensor, other = tf.constant(VALUE), tf.constant(VALUE.T)
    for found, expected in (
        (table + 1.0, tensor + 1.0),
        (1.0 - table, 1.0 - tensor),
        (table * table, tensor * tensor),
        (table / 4.0, tensor / 4.0),
        (table // 4.0, tensor // 4.0),
        (table % 4.0, tensor % 4.0),
        (table**2.0, tensor**2.0),
        (-table, -tensor),
        (abs(table), abs(tensor)),
        (table < 3.0, tensor < 3.0),
        (table >= 3.0, tensor >= 3.0),
        (table == tf.abs(table), tensor == tf.abs(tensor)),
        (table != 3.0, tensor != 3.0),
        (table @ other, tensor @ other),
        (tf.reduce_sum(table, axis=0), tf.reduce_sum(tensor, axis=0)),
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("is_function", [False, True], ids=["client", "step"])
def test_all_of_it_is_assigned_added_and_subtracted(strategy, sharded, is_function):
    variable = sharded(VALUE, parts=3)

    def change(value):
        methods = (variable.assign, variable.assign_add, variable.assign_sub, variable.assign_add)
        return [tf.convert_to_tensor(method(value)) for method in methods]

    found = strategy.schedule(tf.function(change), args=(2 * VALUE,)).result(TIMEOUT) if is_function else change(VALUE)
    factor = 2 if is_function else 1
    for value, times in zip(found, (1, 2, 1, 2), strict=True):
        np.testing.assert_array_equal(value, factor * times * VALUE)
    np.testing.assert_array_equal(variable, 2 * factor * VALUE)
    variable.assign(VALUE.tolist(), read_value=False)
    np.testing.assert_array_equal(variable, VALUE)


def test_a_value_of_another_shape_is_refused_and_changes_nothing(table):
    for method in (table.assign, table.assign_add, table.assign_sub):
        for value in (np.zeros([12, 3], np.float32), np.zeros([9, 3], np.float32), np.zeros([3], np.float32), 1.0):
            with pytest.raises(ValueError, match="shape"):
                method(value)
    np.testing.assert_array_equal(table, VALUE)


def test_a_read_after_an_assignment_in_a_function_has_the_new_value(strategy, sharded):
    variable = sharded(VALUE, parts=2)

    @tf.function
    def step():
        before = tf.convert_to_tensor(variable)
        variable.assign(2.0 * before)
        variable.assign_add(before)
        with tf.control_dependencies([variable.assign_sub(tf.ones([10, 3]))]):
            return before, variable.read_value(), tf.gather(variable, [9, 0])

    before, after, rows = strategy.schedule(step).result(TIMEOUT)
    np.testing.assert_array_equal(before, VALUE)
    np.testing.assert_array_equal(after, 3 * VALUE - 1)
    np.testing.assert_array_equal(rows, (3 * VALUE - 1)[[9, 0]])


def test_what_an_assignment_returns_may_be_waited_for(sharded):
    variable = sharded(VALUE, parts=3)

    @tf.function
    def step():
        changed = variable.assign(2 * VALUE)
        with tf.control_dependencies([tf.group(changed)]):
            return tf.ones([])

    assert step() == 1.0
    np.testing.assert_array_equal(variable, 2 * VALUE)


def test_additions_of_racing_workers_are_all_there(strategy, sharded):
    variable = sharded(np.zeros([9, 200], np.float32), parts=3)

    @tf.function
    def step():
        for _ in tf.range(10):
            variable.assign_add(tf.fill([9, 200], 3.0))
            variable.assign_sub(tf.ones([9, 200]))

    for _ in range(60):
        strategy.schedule(step)
    strategy.join(TIMEOUT)
    np.testing.assert_array_equal(variable, np.full([9, 200], 1200.0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32", "int64", "bool", "string"])
def test_values_of_other_dtypes_are_sharded(sharded, dtype):
    value = tf.as_string(VALUE) if dtype == "string" else tf.cast(VALUE, dtype)
    variable = sharded(value, parts=3)
    assert variable.dtype == value.dtype
    assert tf.reduce_all(variable.assign(value[::-1]) == value[::-1])
    assert tf.reduce_all(variable[2:8] == value[::-1][2:8])
