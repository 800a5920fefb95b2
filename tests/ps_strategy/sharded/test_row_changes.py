"""Tests that rows of a sharded variable change as those of a plain one, and that no worker's addition is lost."""

import numpy as np
import pytest
import tensorflow as tf

TIMEOUT = 120.0
ROWS, WIDTH = 32, 3
VALUE = np.random.default_rng(0).integers(-9, 9, size=(ROWS, WIDTH)).astype(np.float32)
# Of all parts, not in their order.
IDS = [31, 0, 17, 10, 11, 22, 1]
# With repeats, for what does not depend on their order.
REPEATED = [17, 31, 0, 17, 31, 31, 5]
UPDATES = np.random.default_rng(1).integers(1, 5, size=(len(IDS), WIDTH)).astype(np.float32)
BY_SLICES = ("scatter_add", "scatter_sub", "scatter_min", "scatter_max", "scatter_mul", "scatter_div", "scatter_update")
BY_INDICES = ("scatter_nd_add", "scatter_nd_sub", "scatter_nd_min", "scatter_nd_max", "scatter_nd_update")


def change(variable, method, ids, updates):
    if method in BY_INDICES:
        return getattr(variable, method)(tf.constant(ids)[:, tf.newaxis], updates)
    return getattr(variable, method)(tf.IndexedSlices(updates, tf.constant(ids)))


def all_changes(variable):
    """Returns the values after each method, by its name, and whether indices are repeated."""
    found = {}
    for method in (*BY_SLICES, *BY_INDICES):
        for ids in (IDS, REPEATED):
            if ids is IDS or not method.endswith("update"):
                with tf.control_dependencies([variable.assign(VALUE)]):
                    change(variable, method, ids, UPDATES)
                    found[f"{method} of {ids}"] = tf.identity(variable.read_value())
    return found


@pytest.mark.parametrize("place", ["client", pytest.param("step", marks=pytest.mark.long)])
def test_rows_change_as_those_of_a_plain_variable(strategy, sharded, place):
    expected = all_changes(tf.Variable(VALUE))
    for parts in (3, 4) if place == "step" else (3,):
        variable = sharded(VALUE, parts=parts)
        step = tf.function(lambda variable=variable: all_changes(variable))
        found = strategy.schedule(step).result(TIMEOUT) if place == "step" else all_changes(variable)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_what_a_change_returns_has_the_new_value(sharded):
    variable = sharded(np.zeros([5, 2], np.float32), parts=2)
    for change_rows in (variable.scatter_add, variable.batch_scatter_update):
        changed = change_rows(tf.IndexedSlices(tf.ones([2, 2]), tf.constant([4, 1])))
        assert np.sum(tf.convert_to_tensor(changed).numpy(), axis=1).tolist() == [0, 2, 0, 0, 2]


def test_single_elements_and_one_number_change_rows_in_a_step(strategy, sharded):
    variable, other = (sharded(np.zeros([5, 2], np.float32), parts=3) for _ in range(2))

    @tf.function
    def step():
        variable.scatter_nd_add([[4, 1], [0, 0], [4, 1]], [1.0, 2.0, 3.0])
        variable.scatter_nd_update([[2, 1]], [7.0])
        other.scatter_add(tf.IndexedSlices(tf.constant(3.0), tf.constant([4, 0, 4])))

    strategy.schedule(step).result(TIMEOUT)
    assert variable.numpy().tolist() == [[2, 0], [0, 0], [0, 7], [0, 0], [0, 4]]
    assert other.numpy().tolist() == [[3, 3], [0, 0], [0, 0], [0, 0], [6, 6]]


def test_other_rows_than_its_own_and_other_changes_are_refused(sharded):
    variable = sharded(np.zeros([5, 2], np.float32), parts=3)
    for method in (*BY_SLICES, *BY_INDICES):
        for index in (5, -1):
            with pytest.raises(tf.errors.InvalidArgumentError):
                change(variable, method, [index], np.ones([1, 2], np.float32))
    for method in BY_SLICES:
        with pytest.raises(TypeError, match="IndexedSlices"):
            getattr(variable, method)(tf.ones([2, 2]))
    assert not variable.numpy().any()


def test_racing_workers_lose_no_addition(strategy, sharded):
    rows, whole = (sharded(np.zeros([9, 64], np.float32), parts=3) for _ in range(2))
    ids = tf.constant([8, 0, 4, 8])
    in_a_step, steps = 10, 30

    @tf.function
    def step():
        for _ in tf.range(in_a_step):
            rows.scatter_add(tf.IndexedSlices(tf.fill([4, 64], 2.0), ids))
            rows.scatter_sub(tf.IndexedSlices(tf.ones([4, 64]), ids))
            whole.assign_add(tf.fill([9, 64], 3.0))
            whole.assign_sub(tf.ones([9, 64]))

    for _ in range(steps):
        strategy.schedule(step)
    strategy.join(TIMEOUT)
    count = in_a_step * steps
    expected = np.array([count, 0, 0, 0, count, 0, 0, 0, 2 * count])
    np.testing.assert_array_equal(rows, np.repeat(expected[:, np.newaxis], 64, axis=1))
    np.testing.assert_array_equal(whole, np.full([9, 64], 2 * count))
