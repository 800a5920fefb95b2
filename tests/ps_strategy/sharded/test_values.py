"""Tests that a sharded variable has the value of one variable: read, sliced, calculated with, assigned, passed on."""

import numpy as np
import pytest
import tensorflow as tf

TIMEOUT = 120.0
VALUE = np.arange(30, dtype=np.float32).reshape(10, 3) - 7.0

INDICES = {
    "a row from the end": np.s_[-1],
    "rows": np.s_[2:7],
    "every third": np.s_[1::3],
    "backwards": np.s_[::-1],
    "backwards from one to another": np.s_[8:1:-3],
    "beyond the end": np.s_[6:100],
    "rows and columns": np.s_[2:9:2, ::-1],
    "an ellipsis": np.s_[..., 1],
    "a new axis": np.s_[np.newaxis, 2:4],
    "a new axis at the end": np.s_[5, ..., np.newaxis],
    "a mask": VALUE[:, 0] % 2 == 0,
}


@pytest.fixture(scope="module")
def table(sharded):
    return sharded(VALUE, parts=3, name="table")


def test_it_is_a_variable_of_the_full_shape(table):
    assert isinstance(table, tf.Variable)
    assert (table.name, table.shape, table.dtype, len(table)) == ("table:0", (10, 3), tf.float32, 10)
    assert table.trainable
    assert [(part.name, part.shape[0]) for part in table.variables] == [
        (f"table/part_{number}:0", rows) for number, rows in enumerate((4, 3, 3))
    ]
    assert bool(table.is_initialized())
    assert "table" in repr(table)


def test_its_value_is_that_of_its_parts_one_after_the_other(table):
    ways = [table.numpy(), table.read_value(), table.value(), tf.convert_to_tensor(table), np.asarray(table)]
    for value in (*ways, np.concatenate([part.numpy() for part in table.variables])):
        np.testing.assert_array_equal(value, VALUE)


def test_slices_are_those_of_an_array(strategy, table):
    def step():
        return {name: table[key] for name, key in INDICES.items()}

    for found in (step(), strategy.schedule(tf.function(step)).result(TIMEOUT)):
        for name, key in INDICES.items():
            np.testing.assert_array_equal(found[name], VALUE[key], err_msg=name)
    np.testing.assert_array_equal(table[tf.constant(-2)], VALUE[-2])
    np.testing.assert_array_equal(table[tf.constant(2) : tf.constant(8)], VALUE[2:8])
    for outside in (10, -11):
        with pytest.raises(IndexError, match="out of bounds for 'table:0', which has 10 rows"):
            table[outside]
    some = tf.function(lambda row: (table[row], table[2:4])).get_concrete_function(tf.TensorSpec([], tf.int32))
    assert "ReadVariableOp" not in {each.type for each in some.graph.get_operations()}


def test_operators_are_those_of_a_tensor(table):
    def results(each):
        compared = [each < 3.0, each >= 3.0, each == tf.abs(each), each != 3.0]
        computed = [
            1.0 - each,
            each / 4.0,
            each // 4.0,
            each**2.0,
            -each,
            abs(each),
        ]
        return [*compared, *computed, each @ tf.constant(VALUE.T), tf.reduce_sum(each, axis=0)]

    for found, expected in zip(results(table), results(tf.constant(VALUE)), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_all_of_it_is_assigned_added_and_subtracted(strategy, sharded):
    variable = sharded(VALUE, parts=3)

    def change(value):
        methods = (variable.assign, variable.assign_add, variable.assign_sub, variable.assign_add)
        return [tf.convert_to_tensor(method(value)) for method in methods]

    in_step = strategy.schedule(tf.function(change), args=(2 * VALUE,)).result(TIMEOUT)
    for found, factor in ((in_step, 2), (change(VALUE), 1)):
        for value, times in zip(found, (1, 2, 1, 2), strict=True):
            np.testing.assert_array_equal(value, factor * times * VALUE)
    np.testing.assert_array_equal(variable, 2 * VALUE)
    variable.assign(VALUE.tolist(), read_value=False)
    np.testing.assert_array_equal(variable, VALUE)


def test_a_value_of_another_shape_is_refused_and_changes_nothing(table):
    for method in (table.assign, table.assign_add, table.assign_sub):
        for value in (np.zeros([12, 3], np.float32), np.zeros([3], np.float32), 1.0):
            with pytest.raises(ValueError, match="shape"):
                method(value)

    @tf.function(input_signature=[tf.TensorSpec(None)])
    def assign(value):
        table.assign(value)

    with pytest.raises(tf.errors.InvalidArgumentError, match="not compatible with expected shape"):
        assign(tf.ones([12, 3]))
    np.testing.assert_array_equal(table, VALUE)


def test_what_comes_after_an_assignment_in_a_function_has_the_new_value(strategy, sharded):
    variable = sharded(VALUE, parts=2)

    @tf.function
    def step():
        before = tf.convert_to_tensor(variable)
        variable.assign(2.0 * before)
        # What an assignment returns may be waited for.
        with tf.control_dependencies([tf.group(variable.assign_add(before))]):
            waited = tf.identity(variable.variables[1])
        with tf.control_dependencies([variable.assign_sub(tf.ones([10, 3]))]):
            return before, waited, variable.read_value(), tf.gather(variable, [9, 0])

    before, waited, after, rows = strategy.schedule(step).result(TIMEOUT)
    np.testing.assert_array_equal(before, VALUE)
    np.testing.assert_array_equal(waited, 3 * VALUE[5:])
    np.testing.assert_array_equal(after, 3 * VALUE - 1)
    np.testing.assert_array_equal(rows, (3 * VALUE - 1)[[9, 0]])


def test_values_of_other_dtypes_are_sharded(sharded):
    for dtype in ("bfloat16", "int64", "bool", "string"):
        value = tf.as_string(VALUE) if dtype == "string" else tf.cast(VALUE, dtype)
        variable = sharded(value, parts=3)
        assert variable.dtype == value.dtype
        assert tf.reduce_all(variable.assign(value[::-1]) == value[::-1]), dtype
        assert tf.reduce_all(variable[2:8] == value[::-1][2:8]), dtype


ROWS_OF_TWO = np.arange(12, dtype=np.float32).reshape(6, 2)


@pytest.fixture
def tables(sharded):
    """Two variables of one type and shape."""
    return [sharded(ROWS_OF_TWO * factor, parts=2) for factor in (1, 10)]


def test_a_function_takes_it_as_an_argument_and_is_traced_once_for_each(strategy, tables):
    traced = []

    @tf.function
    def add_and_read(table, ids):
        traced.append(table)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, ids))
        table.scatter_add(tape.gradient(loss, table))
        return tf.gather(table, ids)

    added = np.array([[2, 2], [1, 1], [2, 2]])
    for times in (1, 2):
        for table, factor in zip(tables, (1, 10), strict=True):
            found = add_and_read(table, tf.constant([5, 0, 5]))
            np.testing.assert_array_equal(found, factor * ROWS_OF_TWO[[5, 0, 5]] + times * added)
    assert [id(table) for table in traced] == [id(table) for table in tables]
    for table, factor in zip(tables, (1, 10), strict=True):
        found = strategy.schedule(add_and_read, args=(table, np.array([5, 0, 5]))).result(TIMEOUT)
        np.testing.assert_array_equal(found, factor * ROWS_OF_TWO[[5, 0, 5]] + 3 * added)


def test_it_is_one_leaf_of_a_structure_and_one_variable_of_a_module(tables, strategy):
    class Lookups(tf.Module):
        def __init__(self):
            super().__init__()
            self.tables = tables
            self.scale = tf.Variable(2.0)

        @tf.function
        def __call__(self, ids):
            return self.scale * sum(tf.gather(table, ids) for table in self.tables)

    for structure in (tables, {"one": tables[0], "other": (tables[1],)}):
        assert [each is table for each, table in zip(tf.nest.flatten(structure), tables, strict=True)] == [True] * 2
    assert tf.nest.map_structure(lambda table: table.shape, tables) == [(6, 2)] * 2
    assert len({table.ref() for table in [*tables, *tables]}) == 2
    with strategy.scope():
        module = Lookups()
    assert [variable.shape.as_list() for variable in module.trainable_variables] == [[], [6, 2], [6, 2]]
    assert {id(table) for table in tables} <= {id(variable) for variable in module.variables}
    found = strategy.schedule(module.__call__, args=(np.array([5, 1]),)).result(TIMEOUT)
    np.testing.assert_array_equal(found, 22 * ROWS_OF_TWO[[5, 1]])
