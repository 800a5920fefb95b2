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
DEPENDS_ON_ORDER = ("update",)


def change(variable, method, ids, updates):
    if method in BY_INDICES:
        return getattr(variable, method)(tf.constant(ids)[:, tf.newaxis], updates)
    return getattr(variable, method)(tf.IndexedSlices(updates, tf.constant(ids)))


def all_changes(variable, change_and_read):
    """Returns the values after each method, by its name, and whether indices are repeated."""
    found = {}
    for method in (*BY_SLICES, *BY_INDICES):
        for ids in (IDS, REPEATED):
            if ids is IDS or not method.endswith(DEPENDS_ON_ORDER):
                found[f"{method} of {ids}"] = change_and_read(variable, method, ids)
    return found


@pytest.fixture(scope="module")
def expected():
    plain = tf.Variable(VALUE)

    def changed(variable, method, ids):
        change(variable.assign(VALUE), method, ids, UPDATES)
        return variable.numpy()

    return all_changes(plain, changed)


@pytest.mark.long
@pytest.mark.parametrize("parts", [3, 4], ids=["uneven", "even"])
def test_rows_change_in_a_step_as_those_of_a_plain_variable(strategy, sharded, expected, parts):
    variable = sharded(VALUE, parts=parts)

    def changed(variable, method, ids):
        with tf.control_dependencies([variable.assign(VALUE)]):
            change(variable, method, ids, UPDATES)
            return variable.read_value()

    @tf.function
    def step():
        return all_changes(variable, changed)

    found = strategy.schedule(step).result(TIMEOUT)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.long
def test_rows_change_on_the_client_as_those_of_a_plain_variable(sharded, expected):
    variable = sharded(VALUE, parts=3)

    def changed(variable, method, ids):
        variable.assign(VALUE)
        change(variable, method, ids, UPDATES)
        return variable.numpy()

    for name, value in all_changes(variable, changed).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_what_a_change_returns_has_the_new_value(sharded):
    variable = sharded(np.zeros([5, 2], np.float32), parts=2)
    for change_rows in (variable.scatter_add, variable.batch_scatter_update):
        changed = change_rows(tf.IndexedSlices(tf.ones([2, 2]), tf.constant([4, 1])))
        assert np.sum(tf.convert_to_tensor(changed).numpy(), axis=1).tolist() == [0, 2, 0, 0, 2]


def test_one_number_is_added_to_all_elements_of_the_rows(sharded):
    variable = sharded(np.zeros([5, 2], np.float32), parts=2)
    variable.scatter_add(tf.IndexedSlices(tf.constant(3.0), tf.constant([4, 0, 4])))
    assert variable.numpy()[:, 1].tolist() == [3, 0, 0, 0, 6]


def test_single_elements_change_by_scatter_nd(strategy, sharded):
    variable = sharded(np.zeros([5, 2], np.float32), parts=3)

    @tf.function
    def step():
        variable.scatter_nd_add([[4, 1], [0, 0], [4, 1]], [1.0, 2.0, 3.0])
        variable.scatter_nd_update([[2, 1]], [7.0])

    strategy.schedule(step).result(TIMEOUT)
    assert variable.numpy().tolist() == [[2, 0], [0, 0], [0, 7], [0, 0], [0, 4]]


@pytest.mark.parametrize("index", [5, -1])
def test_an_index_out_of_range_is_refused_and_changes_no_other_row(sharded, index):
    variable = sharded(np.zeros([5, 2], np.float32), parts=3)
    for method in (*BY_SLICES, *BY_INDICES):
        with pytest.raises(tf.errors.InvalidArgumentError):
            change(variable, method, [index], np.ones([1, 2], np.float32))
    assert not variable.numpy().any()


def test_what_is_not_indexed_slices_is_refused(sharded):
    variable = sharded(np.zeros([5, 2], np.float32), parts=2)
    for method in BY_SLICES:
        with pytest.raises(TypeError, match="IndexedSlices"):
            getattr(variable, method)(tf.ones([2, 2]))


@pytest.mark.long
def test_racing_workers_lose_no_addition_to_a_row(strategy, sharded):
    variable = sharded(np.zeros([9, 64], np.float32), parts=3)
    ids = [8, 0, 4, 8]
    ones = tf.ones([len(ids), 64])
    in_a_step, steps = 20, 60

    @tf.function
    def step():
        for _ in tf.range(in_a_step):
            variable.scatter_add(tf.IndexedSlices(2.0 * ones, tf.constant(ids)))
            variable.scatter_sub(tf.IndexedSlices(ones, tf.constant(ids)))

    for _ in range(steps):
        strategy.schedule(step)
    strategy.join(TIMEOUT)
    count = in_a_step * steps
    np.testing.assert_array_equal(variable[:, 0], [count, 0, 0, 0, count, 0, 0, 0, 2 * count])
    np.testing.assert_array_equal(np.ptp(variable.numpy(), axis=1), np.zeros(9))
