"""Variables on parameter servers in functions that a scheduled function passes to a dataset, a loop or a branch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.ps_strategy.fusing.fused_calls import COUNT, TIMEOUT, FusedCalls

# More calls than it takes until the messages of a function that runs alone are packed.
CALLS = 20
NUMBERS, FACTORS = [1.0, 2.0, 3.0], [10.0, 20.0, 30.0]


@pytest.fixture
def fused(strategy, monkeypatch):
    return FusedCalls(strategy, monkeypatch)


@pytest.fixture
def variables(strategy):
    """One on each of the two parameter servers."""
    with strategy.scope():
        first, second = tf.Variable(0.0, name="first"), tf.Variable(0.0, name="second")
    assert first.device != second.device
    return first, second


def pairs():
    return tf.data.Dataset.from_tensor_slices((NUMBERS, FACTORS))


def loop(first, second):
    """Adds 6 and 60 to `first` and `second`; returns their former values, and 140."""
    before, total = (first.read_value(), second.read_value()), 0.0
    for x, y in pairs():
        first.assign_add(x)
        second.assign_add(y)
        total += x * y
    return *before, total


def loop_with_break(first, second):
    before, total = (first.read_value(), second.read_value()), 0.0
    for x, y in pairs().repeat():
        first.assign_add(x)
        second.assign_add(y)
        total += x * y
        if total >= 140.0:
            break
    return *before, total


def nested_loop(first, second):
    before, total = (first.read_value(), second.read_value()), 0.0
    for x in tf.data.Dataset.from_tensor_slices(NUMBERS):
        first.assign_add(x)
        for y in tf.data.Dataset.from_tensor_slices([x * 4.0, x * 6.0]):
            second.assign_add(y)
            total += y
    return *before, total + 80.0


def loop_over_zip(first, second):
    numbers, factors = (tf.data.Dataset.from_tensor_slices(values) for values in (NUMBERS, FACTORS))
    before, total = (first.read_value(), second.read_value()), 0.0
    for index, (x, y) in tf.data.Dataset.zip(numbers, factors).enumerate():
        first.assign_add(x)
        second.assign_add(y * tf.cast(index >= 0, tf.float32))
        total += x * y
    return *before, total


def loop_over_map(first, second):
    before = first.read_value(), second.read_value()
    mapped = pairs().map(lambda x, y: (first.assign_add(x), second.assign_add(y), x * y))
    total = 0.0
    for _, _, product in mapped:
        total += product
    return *before, total


def reduced(first, second):
    before = first.read_value(), second.read_value()

    def add(total, element):
        with tf.control_dependencies([first.assign_add(element[0]), second.assign_add(element[1])]):
            return total + element[0] * element[1]

    return *before, pairs().reduce(0.0, add)


STEPS = [loop, loop_with_break, nested_loop, loop_over_zip, loop_over_map, reduced]


def mostly_long(cases, *usual):
    """Returns the cases, all but the usual ones marked as long: tracing each takes a second."""
    return [case if case in usual else pytest.param(case, marks=pytest.mark.long) for case in cases]


@pytest.mark.parametrize("step", mostly_long(STEPS, reduced))
def test_a_loop_over_a_dataset_changes_variables_on_parameter_servers(strategy, variables, step):
    first, second = variables
    function = tf.function(lambda: step(first, second))
    futures = [strategy.schedule(function, worker=1) for _ in range(CALLS)]
    assert [future.result(TIMEOUT) for future in futures] == [
        (6.0 * count, 60.0 * count, 140.0) for count in range(CALLS)
    ]


@pytest.mark.parametrize("step", mostly_long(STEPS, loop))
def test_a_loop_over_a_dataset_changes_variables_in_fused_calls(fused, variables, step):
    first, second = variables
    futures = fused.run(tf.function(lambda: step(first, second)[-1]), [()] * COUNT)
    assert [future.result(timeout=0) for future in futures] == [140.0] * COUNT
    assert (first.numpy(), second.numpy()) == (6.0 * COUNT, 60.0 * COUNT)
    assert max(fused.sizes) > 1


def elements(dataset):
    """All of the dataset's elements, in one."""
    return next(iter(dataset.batch(100)))


def branch(factor, offset):
    return tf.cond(factor > 1.0, lambda: factor + offset, factor.read_value)


def chosen(factor, offset):
    return tf.switch_case(tf.constant(1), [factor.read_value, lambda: factor + offset])


def while_loop(factor, offset):
    return tf.while_loop(lambda number, _: number < offset, lambda number, x: (number + 1.0, x * factor), (0.0, 1.0))


def grouped(factor, offset):
    groups = tf.data.Dataset.from_tensor_slices(NUMBERS).group_by_window(
        lambda x: tf.cast(x * offset, tf.int64) % 2, lambda _, group: group.map(lambda x: x * factor), window_size=3
    )
    return tf.sort(elements(groups))


# With 2.0 as the factor and 3.0 as the offset; they are on two parameter servers.
USES = {
    "map": (lambda a, b: elements(pairs().map(lambda x, y: x * a + b)), [5.0, 7.0, 9.0]),
    "parallel map": (lambda a, b: elements(pairs().map(lambda x, y: x * a + b, num_parallel_calls=2)), [5.0, 7.0, 9.0]),
    "filter": (lambda a, b: elements(pairs().filter(lambda x, y: x * b > a + 1.0).map(lambda x, y: y)), [20.0, 30.0]),
    "interleave": (
        lambda a, b: elements(pairs().interleave(lambda x, y: tf.data.Dataset.from_tensors(x * a + b))),
        [5.0, 7.0, 9.0],
    ),
    "flat_map": (
        lambda a, b: elements(pairs().flat_map(lambda x, y: tf.data.Dataset.from_tensors(x * a + b))),
        [5.0, 7.0, 9.0],
    ),
    "scan": (lambda a, b: elements(pairs().scan(0.0, lambda s, e: (s + e[0], s * a + b))), [3.0, 5.0, 9.0]),
    "take_while": (lambda a, b: elements(pairs().take_while(lambda x, y: x < a).map(lambda x, y: x * b)), [3.0]),
    "group_by_window": (grouped, [2.0, 4.0, 6.0]),
    "reduce": (lambda a, b: pairs().reduce(0.0, lambda s, e: s + e[0] * a + b), 21.0),
    "tf.map_fn": (lambda a, b: tf.map_fn(lambda x: x * a + b, tf.constant(NUMBERS)), [5.0, 7.0, 9.0]),
    "tf.vectorized_map": (lambda a, b: tf.vectorized_map(lambda x: x * a + b, tf.constant(NUMBERS)), [5.0, 7.0, 9.0]),
    "tf.scan": (lambda a, b: tf.scan(lambda s, x: s * a + x * b, tf.constant(NUMBERS)), [1.0, 8.0, 25.0]),
    "tf.foldl": (lambda a, b: tf.foldl(lambda s, x: s * a + x * b, tf.constant(NUMBERS)), 25.0),
    "tf.while_loop": (lambda a, b: while_loop(a, b)[1], 8.0),
    "tf.cond": (branch, 5.0),
    "tf.switch_case": (chosen, 5.0),
}


@pytest.mark.parametrize("use", mostly_long(USES, "map", "tf.while_loop"))
def test_functions_of_datasets_loops_and_branches_read_variables_on_servers(strategy, use):
    with strategy.scope():
        factor, offset = tf.Variable(2.0), tf.Variable(3.0)
    read, expected = USES[use]
    function = tf.function(lambda: read(factor, offset), autograph=False)
    futures = [strategy.schedule(function) for _ in range(CALLS)]
    for future in futures:
        np.testing.assert_array_equal(future.result(TIMEOUT), expected)


@pytest.mark.long
def test_a_model_is_trained_in_a_loop_over_a_dataset(strategy):
    features = np.linspace(-1.0, 1.0, 24, dtype=np.float32).reshape(12, 2)
    labels = features @ np.array([[1.0], [-2.0]], np.float32)

    def model_and_optimizer():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)
        return model, optimizer

    def epoch(model, optimizer):
        for x, y in tf.data.Dataset.from_tensor_slices((features, labels)).batch(4):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    with strategy.scope():
        model, optimizer = model_and_optimizer()
    on_workers = tf.function(lambda: epoch(model, optimizer))
    for _ in range(20):
        strategy.schedule(on_workers, worker=0)
    strategy.join(TIMEOUT)
    local = model_and_optimizer()
    in_one_process = tf.function(lambda: epoch(*local))
    for _ in range(20):
        in_one_process()
    assert int(optimizer.iterations.numpy()) == 60
    for found, expected in zip(model.get_weights(), local[0].get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_an_error_in_a_loop_over_a_dataset_is_raised_as_itself(strategy, variables):
    first, _ = variables

    @tf.function
    def step():
        for x, _ in pairs():
            tf.debugging.assert_less(x, 2.0, "too large")
            first.assign_add(x)

    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        strategy.schedule(step).result(TIMEOUT)
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        strategy.join(TIMEOUT)
