"""Which steps of a call are known to have finished when the call fails, and are not run again."""

import pytest
import tensorflow as tf

from coordinator.ps_strategy.packed_transfers import LARGEST_PACKED
from coordinator.ps_strategy.repeated_function import RepeatedFunction
from tests.ps_strategy.fused_calls import FusedCalls

CALL = 7
BAD = -1


def slowly(number):
    """The same number, after a while; not what TensorFlow could know beforehand."""
    matrix = tf.fill([400, 400], tf.cast(number, tf.float32) * 1e-3)
    for _ in range(8):
        matrix = tf.tanh(matrix @ matrix)
    return number + tf.cast(tf.reduce_min(matrix) > 2.0, number.dtype)


def refused(number):
    """The number, after a while; a step that is given `BAD` fails."""
    number = slowly(number)
    with tf.control_dependencies([tf.debugging.assert_none_equal(number, BAD)]):
        return tf.identity(number)


def failing_call(fn, *numbers):
    """Calls a function once for each number, in one call, which fails; returns what is known to have finished."""
    concrete = fn.get_concrete_function(tf.TensorSpec([], tf.int32))
    repeated = RepeatedFunction(concrete, len(numbers), [False])
    with pytest.raises(tf.errors.InvalidArgumentError):
        repeated.call_on(
            [[tf.constant(number)] for number in numbers],
            concrete.captured_inputs,
            lambda function, given: function._call_flat(given, []),
            CALL,
        )
    assert repeated.finished_of(CALL + 1) == [], "of another call nothing is known"
    return repeated.finished_of(CALL)


def test_the_steps_before_the_one_that_fails_are_known_with_their_results():
    total = tf.Variable(0)

    @tf.function
    def fn(number):
        # Each step waits for the total of the one before.
        before = refused(number + 0 * slowly(total.read_value()))
        return total.assign_add(before).read_value(), tf.strings.as_string(before), before > 1

    found = failing_call(fn, 1, 2, BAD, 4)
    expected = [[1, b"1", False], [3, b"2", True]]
    assert found == expected[: len(found)], "what is noted is true"
    assert found, "the first step has ended long before the third began"
    assert total.numpy() == 3


@pytest.mark.parametrize("result", [tf.range, lambda number: tf.fill([LARGEST_PACKED], number)], ids=["open", "large"])
def test_of_results_that_are_large_or_of_unknown_shape_nothing_is_known(result):
    total = tf.Variable(0)

    @tf.function
    def fn(number):
        before = refused(number + 0 * slowly(total.read_value()))
        total.assign_add(before)
        return result(before)

    assert failing_call(fn, 1, 2, BAD) == []


def test_steps_of_fused_calls_that_failed_count_no_more_than_what_was_run_again(strategy, monkeypatch):
    with strategy.scope():
        counts = [tf.Variable(0) for _ in strategy.parameter_servers]
    # In the middle of the calls of several, of which each worker has one.
    numbers = list(range(18))
    bad = {3, 7}

    @tf.function
    def step(number):
        seen = [count.assign_add(1).read_value() for count in counts]
        tf.debugging.assert_equal(tf.reduce_any([number == each for each in bad]) & (tf.add_n(seen) > 0), False)
        return number * 2

    calls = FusedCalls(strategy, monkeypatch)
    before = strategy.cluster.statistics()
    with pytest.raises(tf.errors.InvalidArgumentError):
        calls.run(step, [[tf.constant(number)] for number in numbers])
    assert calls.sizes
    after = strategy.cluster.statistics()
    # The gate that each worker waited at is among the finished ones.
    finished = after.finished - before.finished - len(strategy.cluster.workers)
    retried = after.retried - before.retried
    for count in counts:
        assert finished <= count.numpy() <= len(numbers) + retried
