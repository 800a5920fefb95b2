"""Tests that the scatter methods of a shared variable do the same as those of `tf.Variable`, by exclusive kernels."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.shared_variable import make_shared

METHODS = ["scatter_add", "scatter_sub", "scatter_max", "scatter_min", "scatter_update"]
# The default suite has a method that adds and one that assigns.
METHOD = pytest.mark.parametrize(
    "method",
    [
        pytest.param(each, marks=() if each in {"scatter_add", "scatter_update"} else pytest.mark.long)
        for each in METHODS
    ],
)
ROWS = 5


def plain_and_shared(row=(3,), dtype=tf.float32, **options):
    value = tf.cast(tf.reshape(tf.range(ROWS * int(np.prod(row))), [ROWS, *row]) % 7, dtype)
    plain, shared = tf.Variable(value, **options), tf.Variable(value, **options)
    make_shared(shared)
    return plain, shared


def updates(indices, row=(3,), dtype=tf.float32):
    shape = [*np.shape(indices), *row]
    return tf.cast(tf.reshape(tf.range(int(np.prod(shape))), shape) * 2 + 1, dtype)


def slices(values, indices):
    return tf.IndexedSlices(values, tf.constant(indices))


def change(variable, method, values, indices, is_function=True):
    """Returns the new value as the method returns it."""

    def changed():
        return getattr(variable, method)(slices(values, indices)).read_value()

    return (tf.function(changed) if is_function else changed)()


def check_same(method, values, indices, row=(3,), dtype=tf.float32):
    for is_function in (False, True):
        plain, shared = plain_and_shared(row, dtype)
        found = [change(each, method, values, indices, is_function) for each in (plain, shared)]
        np.testing.assert_array_equal(*found)
        np.testing.assert_array_equal(plain, shared)


@METHOD
def test_rows_are_updated_as_those_of_a_plain_variable(method):
    repeated = [1, 1, 4, 1] if method in {"scatter_add", "scatter_sub"} else [1, 4]
    for row, indices in (((), 2), ((3,), [[4, 1], [0, 3]]), ((2, 2), np.zeros([0], np.int32)), ((3,), repeated)):
        for values in (updates(indices, row), 2.5):
            check_same(method, values, indices, row)
    check_same(method, updates([1, 4], dtype=tf.bfloat16), np.array([1, 4], np.int64), dtype=tf.bfloat16)


def test_rows_of_bools_and_strings_are_assigned():
    for one, other in ((True, False), (b"one", b"other")):
        shared = tf.Variable([one, one, one])
        make_shared(shared)
        assert change(shared, "scatter_update", [other], [1], False).numpy().tolist() == [one, other, one]


@METHOD
def test_updates_of_unknown_shape_give_the_same_as_on_a_plain_variable(method):
    def changed(variable):
        @tf.function(input_signature=[tf.TensorSpec(None), tf.TensorSpec(None, tf.int32)])
        def step(values, indices):
            return getattr(variable, method)(tf.IndexedSlices(values, indices)).read_value()

        return step

    for options in ({}, {"shape": tf.TensorShape(None)}):
        plain, shared = map(changed, plain_and_shared(**options))
        for values, indices in ((updates([1, 4]), [1, 4]), (tf.constant(9.0), [[2]]), (updates(3), 3)):
            np.testing.assert_array_equal(plain(values, tf.constant(indices)), shared(values, tf.constant(indices)))
        for step in (plain, shared):
            with pytest.raises(tf.errors.InvalidArgumentError):
                # Only a scalar is one value for all rows.
                step(tf.ones([1, 3]), tf.constant([0, 1]))


@METHOD
def test_wrong_indices_shapes_types_and_dtypes_are_refused(method):
    _, shared = plain_and_shared()
    for is_function in (False, True):
        for index in (ROWS, -1):
            with pytest.raises(tf.errors.InvalidArgumentError):
                change(shared, method, tf.ones([2, 3]), [0, index], is_function)
    for shape in ((2, 2), (1, 3), (2, 3, 1)):
        with pytest.raises(tf.errors.InvalidArgumentError):
            change(shared, method, tf.ones(shape), [0, 1], False)
        with pytest.raises(ValueError, match=r"[Ss]hape|[Dd]imension"):
            change(shared, method, tf.ones(shape), [0, 1], True)
    with pytest.raises(TypeError, match=r"must be a `tf\.IndexedSlices`"):
        getattr(shared, method)(tf.ones([3]))
    with pytest.raises(ValueError, match=r"incompatible with dtype|conversion requested dtype"):
        getattr(shared, method)(slices(tf.ones([1, 3], tf.float64), [0]))


@METHOD
def test_arguments_results_and_gradients_are_those_of_tensorflow(method):
    def gradient(variable):
        with tf.GradientTape() as tape:
            before = variable * 2.0
            after = getattr(variable, method)(slices(tf.ones([1, 3]), [1]), True, "named")
            # What the method returns, as a variable is returned as its value.
            found = after * variable
        return tape.gradient([before, found], variable), after

    for call in (gradient, tf.function(gradient)):
        for plain, shared in zip(*map(call, plain_and_shared()), strict=True):
            np.testing.assert_array_equal(plain, shared)
    concrete = tf.function(gradient).get_concrete_function(shared := plain_and_shared()[1])
    assert "named" in {each.name for each in concrete.graph.get_operations()}
    assert isinstance(gradient(shared)[1], tf.Variable)


def types_in(function):
    operations = tf.function(function).get_concrete_function().graph.get_operations()
    return {each.type for each in operations if each.type.startswith("Resource")}


def test_exclusive_kernels_are_used_also_for_returned_values():
    _, shared = plain_and_shared()
    one = slices(tf.ones([1, 3]), [1])
    for method in METHODS:
        exclusive = "ResourceScatterNd" + method.removeprefix("scatter_").capitalize()
        for first in (lambda: shared, lambda: shared.assign_add(shared), lambda: shared.assign(shared * 2.0)):
            assert types_in(lambda first=first, method=method: getattr(first(), method)(one)) == {exclusive}
        assert types_in(lambda m=method: getattr(getattr(shared, m)(one), m)(one)) == {exclusive}
    batch = slices(tf.ones([ROWS, 1]), [[0]] * ROWS)
    assert types_in(lambda: shared.batch_scatter_update(batch)) == {"ResourceScatterNdUpdate"}


def test_scatters_reads_and_assignments_run_in_program_order():
    _, shared = plain_and_shared()

    @tf.function
    def step():
        first = shared.scatter_update(slices(tf.zeros([ROWS, 3]), [0, 1, 2, 3, 4]))
        return first.scatter_add(slices(2.0, [1])).scatter_max(slices(1.0, [0])).assign_add(tf.ones([ROWS, 3]))

    np.testing.assert_array_equal(step()[:, 0], [2.0, 3.0, 1.0, 1.0, 1.0])

    @tf.function
    def assign_what_was_read_before():
        before = shared + 1.0
        shared.scatter_add(slices(10.0, [0]))
        shared.assign(before)

    assign_what_was_read_before()
    np.testing.assert_array_equal(shared[:, 0], [3.0, 4.0, 2.0, 2.0, 2.0])


@pytest.mark.parametrize("method", ["scatter_mul", "scatter_div"])
def test_products_and_quotients_which_have_no_exclusive_kernel_run_under_a_mutex(method):
    for values, indices in ((updates([3, 1]), [3, 1]), (2.5, [2, 2]), (tf.ones([0, 3]), np.zeros([0], np.int32))):
        check_same(method, values, indices)
    _, shared = plain_and_shared()
    with pytest.raises(TypeError, match=r"must be a `tf\.IndexedSlices`"):
        getattr(shared, method)(tf.ones([3]))
    step = tf.function(lambda: getattr(shared, method)(slices(tf.ones([1, 3]), [1]))).get_concrete_function()
    operations = {each.type: each for each in step.graph.get_operations()}
    kernel = operations["ResourceScatter" + method.removeprefix("scatter_").capitalize()]
    assert operations["MutexLock"] in kernel.control_inputs
    assert kernel in operations["ConsumeMutexLock"].control_inputs
    assert not any(hasattr(tf.raw_ops, f"ResourceScatterNd{name}") for name in ("Mul", "Div"))


def test_rows_of_a_variable_on_a_server_can_be_changed_eagerly(strategy):
    with strategy.scope():
        remote = tf.Variable(tf.zeros([ROWS, 3]))
    plain = tf.Variable(tf.zeros([ROWS, 3]))
    for each in (plain, remote):
        for number, method in enumerate(METHODS):
            for values, indices in [(number - 1.5, [1, 3]), (tf.ones([1, 3]), [number])]:
                change(each, method, values, indices, is_function=False)
        each.scatter_mul(slices(tf.fill([2, 3], 3.0), [1, 3]))
        each.scatter_div(slices(2.0, [4]))
    np.testing.assert_array_equal(plain, remote)
    remote.scatter_nd_add([[0]], [[1.0, 2.0, 3.0]])
    np.testing.assert_array_equal(remote[0] - plain[0], [1.0, 2.0, 3.0])
