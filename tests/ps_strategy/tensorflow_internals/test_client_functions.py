"""Tests of what functions on the client need of TensorFlow's private interfaces."""

import pytest
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.client_functions import (
    barriers_in_order,
    call_time_values,
    errors_raised_as,
)
from tests.ps_strategy.tensorflow_internals.private_names import resource_resolvers


class Calls:
    """Counts the calls of functions in which `number` is used."""

    def __init__(self):
        self.count = 0

    def number(self):
        """Returns the number of the call, in the function that is traced."""
        return call_time_values(self._next, [tf.TensorSpec([], tf.int32)], self)[0]

    def _next(self):
        self.count += 1
        return [tf.constant(self.count)]


def test_the_values_of_a_call_are_made_once_for_a_call_and_all_that_it_calls():
    calls = Calls()

    @tf.function
    def inner():
        return calls.number()

    @tf.function
    def outer():
        total = calls.number()
        for _ in tf.range(2):
            total += tf.cond(total > 0, inner, lambda: 0)
        return total

    assert inner().numpy() == 1
    assert [outer().numpy() for _ in range(2)] == [3 * 2, 3 * 3]
    assert calls.count == 3


def test_a_barrier_runs_after_what_was_before_it_and_before_what_follows():
    """Without it, these have no order: they use different variables."""
    calls, log = Calls(), []
    variable = tf.Variable(0)

    def note(_):
        log.append(int(variable.numpy()))

    @tf.function
    def barrier():
        tf.numpy_function(note, [calls.number()], [])

    @tf.function
    def run():
        variable.assign(5)
        barrier()
        variable.assign(6)
        for _ in tf.range(2):
            variable.assign_add(1)
            barrier()
        return variable.assign(0)

    before = set(resource_resolvers())
    with barriers_in_order(calls):
        assert set(resource_resolvers()) - before
        run()
    assert set(resource_resolvers()) == before
    assert log == [5, 7, 8]


def test_the_error_of_a_function_is_replaced_within_the_scope():
    class MyError(Exception):
        pass

    def fail():
        raise ValueError("number 17")

    @tf.function
    def function():
        return tf.numpy_function(fail, [], tf.int64)

    with errors_raised_as(lambda message: MyError() if "number 17" in message else None):
        with pytest.raises(MyError):
            function()
        with pytest.raises(tf.errors.InvalidArgumentError):
            tf.function(lambda: tf.debugging.assert_less(tf.identity(2), 1))()
    with pytest.raises(tf.errors.InvalidArgumentError, match="number 17"):
        function()
