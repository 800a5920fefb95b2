"""Variables on parameter servers in functions that a scheduled function passes to a dataset, a loop or a branch."""

import numpy as np
import tensorflow as tf

from tests.ps_strategy.fusing.fused_calls import COUNT, TIMEOUT, FusedCalls

# More calls than it takes until the messages of a function that runs alone are packed.
CALLS = 20
NUMBERS, FACTORS = [1.0, 2.0, 3.0], [10.0, 20.0, 30.0]


def pairs():
    return tf.data.Dataset.from_tensor_slices((NUMBERS, FACTORS))


def test_a_loop_over_a_dataset_changes_variables_in_fused_calls(strategy, monkeypatch):
    with strategy.scope():
        first, second = tf.Variable(0.0, name="first"), tf.Variable(0.0, name="second")
    fused = FusedCalls(strategy, monkeypatch)

    @tf.function
    def loop():
        total = 0.0
        for x, y in pairs():
            first.assign_add(x)
            second.assign_add(y)
            total += x * y
        return total

    futures = fused.run(loop, [()] * COUNT)
    assert [future.result(timeout=0) for future in futures] == [140.0] * COUNT
    assert (first.numpy(), second.numpy()) == (6.0 * COUNT, 60.0 * COUNT)
    assert max(fused.sizes) > 1


def elements(dataset):
    """All of the dataset's elements, in one."""
    return next(iter(dataset.batch(100)))


def while_loop(factor, offset):
    return tf.while_loop(lambda number, _: number < offset, lambda number, x: (number + 1.0, x * factor), (0.0, 1.0))


# With 2.0 as the factor and 3.0 as the offset; they are on two parameter servers. All are used in one function.
USES = [
    (lambda a, b: elements(pairs().map(lambda x, y: x * a + b, num_parallel_calls=2)), [5.0, 7.0, 9.0]),
    (lambda a, b: elements(pairs().filter(lambda x, y: x * b > a + 1.0).map(lambda x, y: y)), [20.0, 30.0]),
    (lambda a, b: tf.scan(lambda s, x: s * a + x * b, tf.constant(NUMBERS)), [1.0, 8.0, 25.0]),
    (lambda a, b: while_loop(a, b)[1], 8.0),
    (lambda a, b: tf.cond(a > 1.0, lambda: a + b, a.read_value), 5.0),
]


def test_functions_of_datasets_loops_and_branches_read_variables_on_servers(strategy):
    with strategy.scope():
        factor, offset = tf.Variable(2.0), tf.Variable(3.0)
    function = tf.function(lambda: [read(factor, offset) for read, _ in USES], autograph=False)
    futures = [strategy.schedule(function) for _ in range(CALLS)]
    for future in futures:
        for number, (found, (_, expected)) in enumerate(zip(future.result(TIMEOUT), USES, strict=True)):
            np.testing.assert_array_equal(found, expected, str(number))
