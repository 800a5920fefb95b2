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
INDICES = {"rank 0": 2, "rank 1": [3, 0, 1], "rank 2": [[4, 1], [0, 3]], "none": np.zeros([0], np.int32)}
ROWS = 5


def plain_and_shared(row, dtype=tf.float32, **options):
    value = tf.cast(tf.reshape(tf.range(ROWS * int(np.prod(row))), [ROWS, *row]) % 7, dtype)
    plain, shared = tf.Variable(value, **options), tf.Variable(value, **options)
    make_shared(shared)
    return plain, shared


def updates(indices, row, dtype=tf.float32):
    shape = [*np.shape(indices), *row]
    return tf.cast(tf.reshape(tf.range(int(np.prod(shape))), shape) * 2 + 1, dtype)


def slices(values, indices):
    return tf.IndexedSlices(values, tf.constant(indices))


def change(variable, method, values, indices, is_function):
    """Returns the new value as the method returns it."""

    def changed():
        return getattr(variable, method)(slices(values, indices)).read_value()

    return (tf.function(changed) if is_function else changed)()


@pytest.mark.parametrize("is_function", [False, True], ids=["eager", "function"])
@METHOD
@pytest.mark.parametrize(
    ("row", "rank"),
    [((), "rank 1"), ((3,), "rank 2"), *(pytest.param((2, 2), rank, marks=pytest.mark.long) for rank in INDICES)],
)
def test_rows_are_updated_as_those_of_a_plain_variable(method, rank, row, is_function):
    for values in (updates(INDICES[rank], row), 2.5, tf.constant(2.5)):
        plain, shared = plain_and_shared(row)
        found = [change(each, method, values, INDICES[rank], is_function) for each in (plain, shared)]
        np.testing.assert_array_equal(*found)
        np.testing.assert_array_equal(plain, shared)


@pytest.mark.parametrize(
    ("dtype", "methods"),
    [
        ("bfloat16", METHODS),
        *(pytest.param(dtype, METHODS, marks=pytest.mark.long) for dtype in ("int32", "float64", "int8")),
        pytest.param("complex64", ["scatter_add", "scatter_sub", "scatter_update"], marks=pytest.mark.long),
    ],
)
def test_rows_of_other_dtypes_are_updated_as_those_of_a_plain_variable(dtype, methods):
    plain, shared = plain_and_shared((3,), tf.as_dtype(dtype))
    for method in methods:
        for values in (updates([1, 4], (3,), plain.dtype), 3):
            found = [change(each, method, values, np.array([1, 4], np.int64), True) for each in (plain, shared)]
            np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(("one", "other"), [(True, False), (b"one", b"other")])
def test_rows_of_bools_and_strings_are_assigned(one, other):
    shared = tf.Variable([one, one, one])
    make_shared(shared)
    assert change(shared, "scatter_update", [other], [1], False).numpy().tolist() == [one, other, one]


@pytest.mark.parametrize("is_function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("method", ["scatter_add", "scatter_sub"])
def test_repeated_indices_are_summed_or_reduced_to_their_extreme(method, is_function):
    plain, shared = plain_and_shared((3,))
    for each in (plain, shared):
        change(each, method, updates([1, 1, 4, 1], (3,)), [1, 1, 4, 1], is_function)
    np.testing.assert_array_equal(plain, shared)


@METHOD
def test_updates_of_unknown_shape_give_the_same_as_on_a_plain_variable(method):
    def changed(variable):
        @tf.function(input_signature=[tf.TensorSpec(None), tf.TensorSpec(None, tf.int32)])
        def step(values, indices):
            return getattr(variable, method)(tf.IndexedSlices(values, indices)).read_value()

        return step

    for options in ({}, {"shape": tf.TensorShape(None)}):
        plain, shared = map(changed, plain_and_shared((3,), **options))
        for values, indices in ((updates([1, 4], (3,)), [1, 4]), (tf.constant(9.0), [[2]]), (updates(3, (3,)), 3)):
            np.testing.assert_array_equal(plain(values, tf.constant(indices)), shared(values, tf.constant(indices)))
        for step in (plain, shared):
            with pytest.raises(tf.errors.InvalidArgumentError):
                # Only a scalar is one value for all rows.
                step(tf.ones([1, 3]), tf.constant([0, 1]))


@pytest.mark.parametrize("is_function", [False, True], ids=["eager", "function"])
@METHOD
@pytest.mark.parametrize("index", [ROWS, -1])
def test_an_index_out_of_range_is_refused(method, index, is_function):
    for variable in plain_and_shared((3,)):
        with pytest.raises(tf.errors.InvalidArgumentError):
            change(variable, method, tf.ones([2, 3]), [0, index], is_function)


@METHOD
@pytest.mark.parametrize("shape", [(2, 2), (1, 3), (2, 3, 1)])
def test_values_of_another_shape_are_refused(method, shape):
    plain, shared = plain_and_shared((3,))
    with pytest.raises(tf.errors.InvalidArgumentError):
        change(shared, method, tf.ones(shape), [0, 1], False)
    for variable in (plain, shared):
        with pytest.raises(ValueError, match=r"[Ss]hape|[Dd]imension"):
            change(variable, method, tf.ones(shape), [0, 1], True)
    if shape != (2, 2):
        # In this case TensorFlow itself reads beyond the end of the values.
        with pytest.raises(tf.errors.InvalidArgumentError):
            change(plain, method, tf.ones(shape), [0, 1], False)


@METHOD
def test_other_arguments_than_indexed_slices_and_other_dtypes_are_refused(method):
    messages = []
    for variable in plain_and_shared((3,)):
        with pytest.raises(TypeError, match=r"must be a `tf\.IndexedSlices`") as caught:
            getattr(variable, method)(tf.ones([3]))
        messages.append(str(caught.value))
        with pytest.raises(ValueError, match=r"incompatible with dtype|conversion requested dtype"):
            getattr(variable, method)(slices(tf.ones([1, 3], tf.float64), [0]))
    assert messages[0] == messages[1]
    for scalar in (tf.Variable(1.0), tf.Variable(1.0)):
        make_shared(scalar)
        with pytest.raises(tf.errors.InvalidArgumentError):
            getattr(scalar, method)(slices(1.0, 0))


@METHOD
def test_arguments_and_results_are_those_of_tensorflow(method):
    plain, shared = plain_and_shared((3,))
    results = [getattr(each, method)(slices(tf.ones([1, 3]), [1]), True, "named") for each in (plain, shared)]
    assert isinstance(results[1], type(results[0]))
    np.testing.assert_array_equal(*results)

    @tf.function
    def step():
        # A variable is returned as its value.
        return getattr(shared, method)(slices(tf.ones([1, 3]), [1]), use_locking=True, name="named")

    assert "named" in {each.name for each in step.get_concrete_function().graph.get_operations()}
    np.testing.assert_array_equal(step(), shared)


@METHOD
def test_gradients_flow_through_a_scatter_as_in_tensorflow(method):
    def gradient(variable, is_function):
        def step():
            with tf.GradientTape() as tape:
                before = variable * 2.0
                after = getattr(variable, method)(slices(tf.ones([1, 3]), [1])) * variable
            return tape.gradient([before, after], variable)

        return (tf.function(step) if is_function else step)()

    for is_function in (False, True):
        plain, shared = plain_and_shared((3,))
        np.testing.assert_array_equal(gradient(plain, is_function), gradient(shared, is_function))


def types_in(function):
    operations = tf.function(function).get_concrete_function().graph.get_operations()
    return {each.type for each in operations if each.type.startswith("Resource")}


@pytest.mark.parametrize("method", METHODS)
def test_exclusive_kernels_are_used_also_for_returned_values(method):
    _, shared = plain_and_shared((3,))
    exclusive = "ResourceScatterNd" + method.removeprefix("scatter_").capitalize()
    one = slices(tf.ones([1, 3]), [1])
    assert types_in(lambda: getattr(shared, method)(one)) == {exclusive}
    for first in (lambda: shared.assign_add(shared), lambda: shared.assign(shared * 2.0)):
        assert types_in(lambda first=first: getattr(first(), method)(one)) == {exclusive}
    assert types_in(lambda: getattr(getattr(shared, method)(one), method)(one)) == {exclusive}


def test_consecutive_scatters_run_in_program_order():
    _, shared = plain_and_shared((3,))

    @tf.function
    def step():
        first = shared.scatter_update(slices(tf.zeros([ROWS, 3]), [0, 1, 2, 3, 4]))
        return first.scatter_add(slices(2.0, [1])).scatter_max(slices(1.0, [0])).assign_add(tf.ones([ROWS, 3]))

    np.testing.assert_array_equal(step()[:, 0], [2.0, 3.0, 1.0, 1.0, 1.0])


def test_batch_scatter_update_uses_an_exclusive_kernel():
    _, shared = plain_and_shared((3,))
    assert types_in(lambda: shared.batch_scatter_update(slices(tf.ones([ROWS, 1]), [[0]] * ROWS))) == {
        "ResourceScatterNdUpdate"
    }


@pytest.mark.parametrize("is_function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("method", ["scatter_mul", "scatter_div"])
def test_products_and_quotients_are_those_of_a_plain_variable(method, is_function):
    for values, indices in ((updates([3, 1], (3,)), [3, 1]), (2.5, [2, 2]), (tf.ones([0, 3]), np.zeros([0], np.int32))):
        plain, shared = plain_and_shared((3,))
        found = [change(each, method, values, indices, is_function) for each in (plain, shared)]
        np.testing.assert_array_equal(*found)
        np.testing.assert_array_equal(plain, shared)
    with pytest.raises(TypeError, match=r"must be a `tf\.IndexedSlices`"):
        getattr(shared, method)(tf.ones([3]))


@pytest.mark.parametrize("method", ["scatter_mul", "scatter_div"])
def test_products_and_quotients_which_have_no_exclusive_kernel_run_under_a_mutex(method):
    _, shared = plain_and_shared((3,))
    step = tf.function(lambda: getattr(shared, method)(slices(tf.ones([1, 3]), [1]))).get_concrete_function()
    operations = {each.type: each for each in step.graph.get_operations()}
    kernel = operations["ResourceScatter" + method.removeprefix("scatter_").capitalize()]
    assert operations["MutexLock"] in kernel.control_inputs
    assert kernel in operations["ConsumeMutexLock"].control_inputs
    assert not any(hasattr(tf.raw_ops, f"ResourceScatterNd{name}") for name in ("Mul", "Div"))


def test_a_value_read_before_a_scatter_is_not_the_current_value():
    _, shared = plain_and_shared(())

    @tf.function
    def step():
        before = shared + 1.0
        shared.scatter_add(slices(10.0, [0]))
        shared.assign(before)

    step()
    np.testing.assert_array_equal(shared, [1.0, 2.0, 3.0, 4.0, 5.0])


def test_rows_of_a_variable_on_a_server_can_be_changed_eagerly(strategy):
    with strategy.scope():
        remote = tf.Variable(tf.zeros([ROWS, 3]))
    plain = tf.Variable(tf.zeros([ROWS, 3]))
    for number, method in enumerate(METHODS):
        for values, indices in [(number - 1.5, [1, 3]), (tf.ones([1, 3]), [number]), (tf.ones([0, 3]), np.int32([]))]:
            found = [change(each, method, values, indices, is_function=False) for each in (plain, remote)]
            np.testing.assert_array_equal(*found, err_msg=method)
    for each in (plain, remote):
        each.scatter_mul(slices(tf.fill([2, 3], 3.0), [1, 3]))
        each.scatter_div(slices(2.0, [4]))
    np.testing.assert_array_equal(plain, remote)
    remote.scatter_nd_add([[0]], [[1.0, 2.0, 3.0]])
    np.testing.assert_array_equal(remote[0] - plain[0], [1.0, 2.0, 3.0])
