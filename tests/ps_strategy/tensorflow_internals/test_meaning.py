"""Tests that TensorFlow's private interfaces for calls exist and mean what the library assumes."""

import concurrent.futures

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context, executor

from coordinator.ps_strategy.tensorflow_internals import functions
from coordinator.ps_strategy.tensorflow_internals.functions import CancellationManager, call_concrete

TIMEOUT = 30.0


@tf.function
def add(x, y=10, *, z=100):
    return {"sum": x + y + z, "none": None}


def call(concrete, *inputs, manager=None):
    """Calls a concrete function with its own captures."""
    inputs = [*inputs, *concrete.captured_inputs]
    return call_concrete(concrete, inputs, manager or CancellationManager())


def in_thread(function):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(TIMEOUT)


def test_an_executor_belongs_to_the_thread_that_binds_it_and_keeps_it():
    def bound_is_async():
        bound = functions.bind_executor()
        assert (tf.constant(1) + 1).numpy() == 2
        bound.clear_error()
        return context.context().executor.is_async()

    def set_another():
        # One that can be distinguished from the executor that all threads share.
        kept = executor.new_executor(enable_async=True)
        context.context().executor = kept
        found = {"bound": in_thread(bound_is_async), "other": context.context().executor.is_async()}
        del kept
        return found | {"fallen back": context.context().executor.is_async()}

    assert in_thread(set_another) == {"bound": False, "other": True, "fallen back": False}


def test_a_cancellation_reaches_the_calls_that_are_made_with_it_and_no_others():
    queue = tf.queue.FIFOQueue(1, tf.int32)
    concrete = tf.function(lambda: queue.dequeue() + 1).get_concrete_function()
    cancelled, other = CancellationManager(), CancellationManager()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ended, continued = (pool.submit(call, concrete, manager=manager) for manager in (cancelled, other))
        assert not cancelled.is_cancelled
        cancelled.cancel()
        cancelled.cancel()
        with pytest.raises(tf.errors.CancelledError):
            ended.result(TIMEOUT)
        assert (cancelled.is_cancelled, other.is_cancelled) == (True, False)
        with pytest.raises(tf.errors.CancelledError):
            call(concrete, manager=cancelled)
        queue.enqueue(5)
        assert continued.result(TIMEOUT).numpy() == 6


def test_arguments_are_completed_by_defaults_and_found_by_name():
    class Model:
        @tf.function
        def step(self, x, *others, rate=1.0, **options):
            return x

    assert functions.with_defaults(add, (1,), {}) == ((1, 10), {"z": 100})
    assert functions.with_defaults(add, (1, 2), {"z": 3}) == ((1, 2), {"z": 3})
    assert functions.with_defaults(add, (), {"y": 2, "x": 1}) == ((1, 2), {"z": 100})
    concrete = add.get_concrete_function(tf.TensorSpec([], tf.int32), 5)
    assert functions.with_defaults(concrete, (1,), {}) == ((1, 5), {"z": 100})
    with pytest.raises(TypeError, match="too many positional"):
        functions.with_defaults(add, (1, 2, 3), {})
    assert functions.with_defaults(Model().step, (1,), {}) == ((1,), {"rate": 1.0}), "`self` is no argument"
    found = functions.named_arguments(Model().step, (1, 2, 3), {"rate": 4, "flag": True})
    assert found == {"x": 1, "others": (2, 3), "rate": 4, "options": {"flag": True}}


def test_a_function_takes_flat_tensors_and_a_call_packs_what_it_returns():
    concrete = add.get_concrete_function(tf.TensorSpec([], tf.int32), z=tf.TensorSpec([], tf.int32))
    inputs = functions.flat_inputs(concrete, (np.int32(1), 10), {"z": tf.constant(3)})
    assert [int(tensor) for tensor in inputs] == [1, 3]
    assert call(concrete, *inputs) == {"sum": tf.constant(14), "none": None}
    assert call(tf.function(lambda: None).get_concrete_function()) is None
    with pytest.raises(TypeError, match="missing a required argument"):
        functions.flat_inputs(concrete, (1,), {})
    with pytest.raises(TypeError, match="Cannot convert 'text'"):
        functions.flat_inputs(concrete, ("text", 10), {"z": 3})


def test_captures_follow_the_arguments_and_may_be_replaced():
    variables = [tf.Variable(1.0), tf.Variable(100.0)]
    concrete = tf.function(variables[0].assign_add).get_concrete_function(tf.TensorSpec([]))
    assert concrete.captured_inputs[0] is variables[0].handle
    value = call_concrete(concrete, [tf.constant(5.0), variables[1].handle], CancellationManager())
    assert [each.numpy() for each in (value, *variables)] == [105, 1, 105]


def test_an_error_of_a_call_names_the_line_in_the_users_code():
    @tf.function
    def check(x):
        tf.debugging.assert_equal(x, 0, "must be zero")

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)Detected at node.*, in check.*must be zero"):
        call(check.get_concrete_function(tf.TensorSpec([], tf.int32)), tf.constant(1))


def test_an_untraced_copy_is_the_same_function_without_traces(tmp_path):
    traces, module = [], tf.Module()

    @tf.function(reduce_retracing=True, input_signature=[tf.TensorSpec([], tf.int32)])
    def double(x):
        traces.append(x)
        return 2 * x

    assert double(tf.constant(1)) == 2
    again = functions.untraced_copy(double)
    assert again is not double
    assert (again(tf.constant(1)), double(tf.constant(1))) == (2, 2)
    assert len(traces) == 2
    assert again.python_function is double.python_function
    module.double = double
    tf.saved_model.save(module, str(tmp_path))
    # A function of a saved model cannot be traced again.
    assert functions.untraced_copy(tf.saved_model.load(str(tmp_path)).double) is None
