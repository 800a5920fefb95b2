"""Tests of variables that many functions change at once: no update is lost, and reads are as few as possible."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.shared_variable import (
    ServerMutex,
    make_shared,
    read_variable,
    reads_not_replaced,
    reads_replaced,
)
from tests.ps_strategy.every_worker import concrete_function
from tests.ps_strategy.tensorflow_internals.private_names import function_in, rate_variable
from tests.updates.state.locked_sections import locked_operations, waits_under_locks

TIMEOUT = 120.0


def shared(value):
    variable = tf.Variable(value, trainable=False)
    make_shared(variable)
    return variable


def reads_of(concrete, variable):
    """Returns how many operations of a function, its branches and loops included, read a variable."""
    return _reads_in(concrete.graph, variable.handle)


def _reads_in(graph, handle):
    inside = next((inside for outside, inside in graph.captures if outside is handle), None)
    own = [] if inside is None else [each for each in inside.consumers() if each.type == "ReadVariableOp"]
    parts = {
        str(each.get_attr(name).name)
        for each in graph.get_operations()
        for name in ("then_branch", "else_branch", "body", "cond")
        if each.type in ("If", "StatelessIf", "While", "StatelessWhile") and name in each.node_def.attr
    }
    return len(own) + sum(_reads_in(function_in(graph, part).graph, handle) for part in parts)


def after(_, variable):
    return [variable * 2.0, variable * 3.0]


def waited(variable):
    with tf.control_dependencies([tf.random.normal([])]):
        return variable + 0.0


def counted_in_a_loop(variable):
    total = tf.constant(0.0)
    for _ in tf.range(3):
        total += variable
        variable.assign_add(1.0)
    return total


def watched(variable):
    before = variable + 0.0
    with tf.GradientTape() as tape:
        tape.watch(variable)
        y = variable * variable
    return before + tape.gradient(y, variable)


CASES = {
    "used twice": (lambda v: [v + 1.0, v * 2.0, tf.cast(v, tf.float64)], 1, [11.0, 20.0, 10.0]),
    "assigned in between": (lambda v: [v + 1.0, *after(v.assign(3.0), v)], 2, [11.0, 6.0, 9.0]),
    "added to": (lambda v: [*after(v.assign(v + 1.0), v), *after(v.assign(v + 1.0), v)], 3, [22.0, 33.0, 24.0, 36.0]),
    "read on purpose": (lambda v: [v + 1.0, v.read_value(), v.read_value()], 3, [11.0, 10.0, 10.0]),
    "after a wait": (lambda v: [v + 1.0, waited(v)], 2, [11.0, 10.0]),
    "in a branch": (lambda v: [v + 1.0, tf.cond(v > 0.0, lambda: v * 2.0, lambda: v * 3.0)], 1, [11.0, 20.0]),
    "first in a branch": (lambda v: [tf.cond(tf.timestamp() > 0.0, lambda: 2.0 * (v + 1.0), lambda: v)], 2, [22.0]),
    # The result of an assignment is one more read.
    "assigned in a branch": (
        lambda v: [tf.cond(v > 0.0, lambda: [v.assign(2.0), v + 1.0][1], lambda: v + 0.0), v + 0.0],
        3,
        [3.0, 2.0],
    ),
    "in a loop": (lambda v: [v + 1.0, counted_in_a_loop(v), v + 0.0], 3, [11.0, 33.0, 13.0]),
    # Whatever a nested function does to it.
    "after a function": (lambda v: [v + 1.0, tf.function(lambda: v.assign_add(1.0))(), v + 0.0][::2], 2, [11.0, 11.0]),
    "watched by a tape": (lambda v: [watched(v)], 3, [30.0]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_scalar_is_read_as_often_as_needed_and_its_value_is_right(name):
    use, reads, expected = CASES[name]
    variable = shared(10.0)
    function = tf.function(lambda: use(variable))
    concrete = function.get_concrete_function()
    assert [float(each) for each in function()] == expected
    assert reads_of(concrete, variable) == reads


def test_adam_reads_iterations_and_learning_rate_once_per_step(strategy):
    with strategy.scope():
        weights, optimizer = [keras.Variable([1.0]) for _ in range(3)], keras.optimizers.Adam(0.5)
        optimizer.build(weights)
    step = tf.function(lambda: optimizer.apply([tf.ones([1])] * 3, weights), autograph=False)
    concrete = concrete_function(strategy, step)
    assert [reads_of(concrete, each.value) for each in (optimizer.iterations, rate_variable(optimizer))] == [1, 1]


def test_assigning_a_read_value_plus_a_change_loses_no_update(strategy):
    steps = 90
    with strategy.scope():
        added, subtracted, added_to = (tf.Variable([0.0, 0.0]) for _ in range(3))
        # Keras adds by assigning the sum.
        weight = keras.Variable(0, dtype="int64", trainable=False)

    @tf.function
    def step():
        added.assign(added + 1.0)
        subtracted.assign(subtracted - 1.0)
        added_to.assign(tf.constant([1.0, 2.0]) + added_to)
        weight.assign_add(2)
        weight.assign_sub(1)

    for _ in range(steps):
        strategy.schedule(step)
    strategy.join(TIMEOUT)
    assert [each.numpy().tolist() for each in (added, subtracted, added_to)] == [
        [steps, steps],
        [-steps, -steps],
        [steps, 2 * steps],
    ]
    assert int(weight) == steps


def test_a_single_function_computes_what_is_written(strategy):
    changes = {
        13.0: [lambda v: [v.assign(v + 1.0), v.assign(v + 2.0)]],
        31.0: [lambda v: v.assign(v * 3.0 + 1.0)],
        20.0: [lambda v: v.assign(v + v)],
        -9.0: [lambda v: v.assign(1.0 - v)],
        6.0: [lambda v: [v.assign(5.0), v.assign(v + 1.0)]],
        11.0: [
            lambda v: [before := v + 1.0, v.assign(5.0), v.assign(before)],
            lambda v: tf.cond(v > 0.0, lambda: v.assign(v + 1.0), lambda: v.assign(v - 1.0)),
            lambda v: v.assign(tf.identity(v) + 1.0),
        ],
    }
    cases = [(expected, change) for expected, each in changes.items() for change in each]
    with strategy.scope():
        variables = [tf.Variable(10.0) for _ in cases]

    @tf.function(autograph=False)
    def step():
        for (_, change), variable in zip(cases, variables, strict=True):
            change(variable)
        return [variable.read_value() for variable in variables]

    assert strategy.schedule(step).result() == [expected for expected, _ in cases]
    assert float(variables[0].assign(variables[0] + 1.0)) == 14.0, "on the client"
    with pytest.raises(ValueError, match="Shape mismatch"):
        strategy.schedule(tf.function(lambda: variables[0].assign(variables[0] + tf.ones([2]))))


def test_no_addition_to_rows_is_lost(strategy):
    # So many rows, and changes of all of them, that the updates of workers overlap.
    rows, width, in_a_step, steps = 2048, 64, 5, 16
    with strategy.scope():
        table, factors = tf.Variable(tf.zeros([rows, width])), tf.Variable(tf.ones([rows, width]))

    @tf.function
    def step():
        for _ in tf.range(in_a_step):
            table.scatter_add(tf.IndexedSlices(tf.ones([rows, width]), tf.range(rows)))
            factors.scatter_mul(tf.IndexedSlices(2.0 * tf.ones([rows, width]), tf.range(rows)))
            factors.scatter_div(tf.IndexedSlices(2.0, tf.range(rows)))

    for _ in range(steps):
        strategy.schedule(step)
    strategy.join(TIMEOUT)
    np.testing.assert_array_equal(table, np.full([rows, width], steps * in_a_step))
    np.testing.assert_array_equal(factors, np.ones([rows, width]))


METHODS = ["scatter_add", "scatter_sub", "scatter_max", "scatter_min", "scatter_update"]
# One that adds and one that assigns.
METHOD = pytest.mark.parametrize("method", ["scatter_add", "scatter_update"])
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
    if method == "scatter_update":
        words = tf.Variable([b"one"] * 3)
        make_shared(words)
        assert change(words, method, [b"other"], [1], False).numpy().tolist() == [b"one", b"other", b"one"]


def test_updates_of_unknown_shape_give_the_same_as_on_a_plain_variable():
    def changed(variable):
        @tf.function(input_signature=[tf.TensorSpec(None), tf.TensorSpec(None, tf.int32)])
        def step(values, indices):
            return variable.scatter_add(tf.IndexedSlices(values, indices)).read_value()

        return step

    plain, shared = map(changed, plain_and_shared(shape=tf.TensorShape(None)))
    for values, indices in ((updates([1, 4]), [1, 4]), (tf.constant(9.0), [[2]]), (updates(3), 3)):
        np.testing.assert_array_equal(plain(values, tf.constant(indices)), shared(values, tf.constant(indices)))
    with pytest.raises(tf.errors.InvalidArgumentError):
        # Only a scalar is one value for all rows.
        shared(tf.ones([1, 3]), tf.constant([0, 1]))


@METHOD
def test_wrong_indices_shapes_types_and_dtypes_are_refused(method):
    _, shared = plain_and_shared()
    for index in (ROWS, -1):
        with pytest.raises(tf.errors.InvalidArgumentError):
            change(shared, method, tf.ones([2, 3]), [0, index], is_function=index < 0)
    for shape in ((2, 2), (1, 3)):
        with pytest.raises(tf.errors.InvalidArgumentError):
            change(shared, method, tf.ones(shape), [0, 1], False)
        with pytest.raises(ValueError, match=r"[Ss]hape|[Dd]imension"):
            change(shared, method, tf.ones(shape), [0, 1], True)
    with pytest.raises(TypeError, match=r"must be a `tf\.IndexedSlices`"):
        getattr(shared, method)(tf.ones([3]))
    with pytest.raises(ValueError, match=r"incompatible with dtype|conversion requested dtype"):
        getattr(shared, method)(slices(tf.ones([1, 3], tf.float64), [0]))


def test_arguments_results_and_gradients_are_those_of_tensorflow():
    def gradient(variable):
        with tf.GradientTape() as tape:
            before = variable * 2.0
            after = variable.scatter_add(slices(tf.ones([1, 3]), [1]), True, "named")
            # What the method returns, as a variable is returned as its value.
            found = after * variable
        return tape.gradient([before, found], variable), after

    for call in (gradient, function := tf.function(gradient)):
        for plain, shared in zip(*map(call, plain_and_shared()), strict=True):
            np.testing.assert_array_equal(plain, shared)
    concrete = function.get_concrete_function(shared := plain_and_shared()[1])
    assert "named" in {each.name for each in concrete.graph.get_operations()}
    assert isinstance(gradient(shared)[1], tf.Variable)


def test_exclusive_kernels_are_used_also_for_returned_values():
    _, shared = plain_and_shared()
    one = slices(tf.ones([1, 3]), [1])

    def types_in(function):
        operations = tf.function(function, autograph=False).get_concrete_function().graph.get_operations()
        return {each.type for each in operations if each.type.startswith("Resource")}

    for method in METHODS:
        exclusive = "ResourceScatterNd" + method.removeprefix("scatter_").capitalize()
        for first in (lambda: shared, lambda: shared.assign(shared * 2.0)):
            assert types_in(lambda first=first, method=method: getattr(first(), method)(one)) == {exclusive}
        assert types_in(lambda m=method: getattr(getattr(shared, m)(one), m)(one)) == {exclusive}
    batch = slices(tf.ones([ROWS, 1]), [[0]] * ROWS)
    assert types_in(lambda: shared.batch_scatter_update(batch)) == {"ResourceScatterNdUpdate"}


def test_scatters_reads_and_assignments_run_in_program_order():
    _, shared = plain_and_shared()

    @tf.function
    def step():
        first = shared.scatter_update(slices(tf.zeros([ROWS, 3]), [0, 1, 2, 3, 4]))
        before = shared + 1.0
        added = first.scatter_add(slices(2.0, [1])).scatter_max(slices(1.0, [0])).assign_add(tf.ones([ROWS, 3]))
        value = added.read_value()
        shared.scatter_add(slices(10.0, [0]))
        shared.assign(before)
        return value

    np.testing.assert_array_equal(step()[:, 0], [2.0, 3.0, 1.0, 1.0, 1.0])
    np.testing.assert_array_equal(shared, np.ones([ROWS, 3]))


def test_products_and_quotients_which_have_no_exclusive_kernel_run_under_a_mutex():
    for name in ("mul", "div"):
        method = f"scatter_{name}"
        check_same(method, updates([3, 1]), [3, 1])
        check_same(method, 2.5, [2, 2])
        _, shared = plain_and_shared()
        step = tf.function(lambda: getattr(shared, method)(slices(tf.ones([1, 3]), [1]))).get_concrete_function()  # noqa: B023
        operations = {each.type: each for each in step.graph.get_operations()}
        kernel = operations[f"ResourceScatter{name.capitalize()}"]
        assert operations["MutexLock"] in kernel.control_inputs
        assert kernel in operations["ConsumeMutexLock"].control_inputs
        assert not hasattr(tf.raw_ops, f"ResourceScatterNd{name.capitalize()}")


def test_rows_of_a_variable_on_a_server_can_be_changed_eagerly(strategy):
    with strategy.scope():
        remote = tf.Variable(tf.zeros([ROWS, 3]))
    for number, method in enumerate(METHODS):
        change(remote, method, number - 1.5, [1, 3], is_function=False)
    remote.scatter_mul(slices(tf.fill([2, 3], 3.0), [1, 3]))
    remote.scatter_nd_add([[0]], [[1.0, 2.0, 3.0]])
    np.testing.assert_array_equal(remote, [[1.0, 2.0, 3.0], [7.5] * 3, [0.0] * 3, [7.5] * 3, [0.0] * 3])


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


NAME = "coordinator/tests/exclusive"


@pytest.fixture
def variable(strategy):
    with strategy.scope():
        return tf.Variable(0.0)


def test_two_functions_that_hold_one_lock_do_not_run_at_once(strategy, variable):
    def adding():
        # Created in each function: a lock is identified by its name.
        lock = ServerMutex(NAME, variable.device)

        @tf.function(autograph=False)
        def add_one_slowly():
            with lock.hold():
                before = variable.read_value()
                matrix = tf.fill([100, 100], before * 1e-3)
                for _ in range(4):
                    matrix = tf.tanh(matrix @ matrix)
                with tf.control_dependencies([matrix]):
                    variable.assign(before + 1.0, read_value=False)

        return add_one_slowly

    steps = adding(), adding()
    for number in range(40):
        strategy.schedule(steps[number % 2])
    strategy.join(TIMEOUT)
    assert variable.numpy() == 40


def test_a_mutex_is_held_after_its_inputs_until_all_operations_end_even_by_an_error(strategy, variable):
    lock = ServerMutex(NAME, variable.device)

    @tf.function(autograph=False)
    def step(x):
        doubled = x * 2.0
        with lock.hold([doubled]):
            with tf.control_dependencies([tf.debugging.assert_positive(doubled, "must be positive")]):
                variable.assign_add(doubled, read_value=False)
            after = variable.read_value()
            unused = tf.timestamp(name="unused")
        assert unused.device == lock.device
        return after

    concrete = concrete_function(strategy, step, tf.constant(1.0))
    assert waits_under_locks(concrete) == []
    [held] = [each for each in concrete.graph.get_operations() if each.type == "MutexLock"]
    assert held.device == lock.device
    names = {operation.type for operation in locked_operations(held)}
    assert {"AssignAddVariableOp", "ReadVariableOp", "Timestamp"} <= names
    for _ in range(3):
        future = strategy.schedule(step, args=(tf.constant(-1.0),))
        for wait in (future.result, strategy.join):
            with pytest.raises(tf.errors.InvalidArgumentError, match="must be positive"):
                wait(TIMEOUT)
    assert strategy.schedule(step, args=(tf.constant(3.0),)).result(TIMEOUT) == 6
