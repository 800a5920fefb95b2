"""Tests of what functions on the client need of TensorFlow's private interfaces."""

import pytest
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.graph_calls import (
    barriers_in_order,
    call_time_values,
    plain_loops_as,
)
from tests.ps_strategy.tensorflow_internals.private_names import range_loop, resource_resolvers


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
    inner = tf.function(calls.number)

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

    @tf.function
    def barrier():
        tf.numpy_function(lambda _: log.append(int(variable.numpy())), [calls.number()], [])

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


@pytest.fixture
def noted():
    """The calls of loops that were replaced."""
    calls = []

    def replace(*call):
        calls.append(call)
        return True

    former = range_loop()
    with plain_loops_as(replace):
        yield calls
    assert range_loop() is former


def _call(*_args, **_kwargs):
    """Is called in loops."""
    return tf.constant(1)


def test_a_loop_that_makes_the_same_call_each_time_may_be_replaced(noted):
    shape = tf.TensorShape([5])

    @tf.function
    def plain(*bounds):
        for _ in tf.range(*bounds):
            unused = _call(shape.rank, key=[1, {"a": 2}])  # noqa: F841
        return noted[-1][3]

    for bounds in ((3,), (1, 8, 3), (3, 0, -1), (2, 2)):
        assert plain(*map(tf.constant, bounds)).numpy() == len(range(*bounds))
        assert noted[-1][:3] == (_call, (1,), {"key": [1, {"a": 2}]})


def _computed_argument(count):
    variable = tf.constant(1)
    for _ in tf.range(count):
        _call(variable + 1)


def _break(count):
    for _ in tf.range(count):
        _call()
        if count > 2:
            break


def _values(count):
    for _ in tf.fill([count], 1):
        _call()


def test_a_loop_that_does_more_than_the_same_call_is_not_replaced(noted):
    for loop in (_computed_argument, _break, _values):
        tf.function(loop).get_concrete_function(tf.TensorSpec([], tf.int32))
        assert noted == [], loop
