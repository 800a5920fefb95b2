"""Tests that TensorFlow's private interfaces for functions mean what the library assumes."""

import concurrent.futures
import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import ops

from coordinator.ps_strategy.fusing.graph_copies import packed_function
from coordinator.ps_strategy.tensorflow_internals import functions
from coordinator.ps_strategy.tensorflow_internals.functions import (
    CancellationManager,
    FunctionRegistration,
    call_concrete,
    custom_gradients_freed,
)

TIMEOUT = 120.0


def call(concrete, *inputs, manager=None):
    """Calls a concrete function with its own captures."""
    inputs = [*inputs, *concrete.captured_inputs]
    return call_concrete(concrete, inputs, manager or CancellationManager())


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


def test_an_untraced_copy_is_the_same_function_without_traces(tmp_path):
    traces, module = [], tf.Module()
    module.double = tf.function(lambda x: (traces.append(x), 2 * x)[1], input_signature=[tf.TensorSpec([], tf.int32)])
    assert module.double(tf.constant(1)) == 2
    again = functions.untraced_copy(module.double)
    assert (again(tf.constant(1)), module.double(tf.constant(1)), len(traces)) == (2, 2, 2)
    assert again.python_function is module.double.python_function
    tf.saved_model.save(module, str(tmp_path))
    # A function of a saved model cannot be traced again.
    assert functions.untraced_copy(tf.saved_model.load(str(tmp_path)).double) is None


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    with custom_gradients_freed():
        yield


def registered() -> set[str]:
    for _ in range(3):
        gc.collect()
    return set(ops.gradient_registry.list())


@tf.custom_gradient
def doubled(x: Any) -> Any:
    """Returns its argument, with twice the gradient."""
    return tf.identity(x), lambda change: 2.0 * change


def gradient_of(function: Any, x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return tape.gradient(y, x)


def function_of(variable: tf.Variable) -> Any:
    inner = tf.function(lambda x: doubled(x) * tf.nn.silu(tf.ones([])))
    return tf.function(lambda x: inner(tf.cond(x > 0.0, lambda: doubled(x), lambda: x)) * variable)


@pytest.mark.long
def test_gradients_are_computed_as_long_as_the_function_lives_and_then_freed() -> None:
    before = registered()
    variable, x = tf.Variable(3.0), tf.constant(1.0)
    handle = weakref.ref(variable.handle)
    function = function_of(variable)
    function(x)
    # What is traced later, and after a garbage collection, finds them, too.
    assert len(registered() - before) >= 3
    later = tf.function(functools.partial(gradient_of, function))
    expected = 2.0 * 2.0 * 3.0 * float(tf.nn.silu(1.0))
    assert [float(gradient_of(function, x)), float(later(x))] == pytest.approx([expected] * 2)
    del function, later, variable
    assert registered() <= before
    assert handle() is None


@pytest.fixture
def registration():
    registration = FunctionRegistration(longest_wait=TIMEOUT)
    yield registration
    registration.close()


@pytest.fixture
def thread():
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield pool


def traced_and_dropped(inside=lambda: None):
    """Traces a function, deletes it, and returns its name."""

    @tf.function
    def function():
        inside()
        return tf.constant(3)

    name = function.get_concrete_function().name
    del function
    gc.collect()
    return name


def test_a_function_is_registered_when_the_change_of_the_cluster_is_over(registration, thread):
    # One that is closed does not disable another.
    FunctionRegistration(longest_wait=TIMEOUT).close()
    reached = threading.Event()
    with registration.held_back():
        traced = thread.submit(traced_and_dropped, reached.set)
        assert reached.wait(TIMEOUT)
        assert tf.function(lambda: tf.constant(3))().numpy() == 3, "the thread that changes the cluster may trace"
        assert not concurrent.futures.wait([traced], 0.2).done
    traced.result(TIMEOUT)


def test_an_operation_that_is_used_for_the_first_time_registers_no_function(registration):
    FunctionRegistration(longest_wait=TIMEOUT).close()
    # TensorFlow would wrap it in a function for this number of inputs, past the methods that hold registrations back.
    assert tf.add_n([tf.constant(1)] * 97).numpy() == 97
    assert list(tf.data.Dataset.range(2).with_options(tf.data.Options()).map(lambda x: x + 1)) == [1, 2]
    assert not any("AddN_N_97" in str(name) for name in context.context().list_function_names())


def test_a_function_deleted_while_the_cluster_changes_is_removed_afterwards(registration):
    with registration.held_back():
        name = traced_and_dropped()
        assert context.context().has_function(name)
    assert not context.context().has_function(name)
    assert not context.context().has_function(traced_and_dropped())


def test_a_function_is_removed_although_a_server_is_not_connected(registration, monkeypatch):
    def refuse(name):
        raise tf.errors.InvalidArgumentError(None, None, f"Client not found, of {name}")

    monkeypatch.setattr(registration, "remove", refuse)
    # An exception in a finalizer would be a warning, which is an error here.
    with registration.held_back():
        traced_and_dropped()
    traced_and_dropped()


@pytest.mark.parametrize("what", ["register", "remove"])
def test_a_change_of_the_cluster_waits_while_a_function_is_registered_or_removed(
    registration, thread, monkeypatch, what
):
    begun, may_end, usual = threading.Event(), threading.Event(), getattr(registration, what)

    def slowly(function):
        begun.set()
        assert may_end.wait(TIMEOUT)
        usual(function)

    def change():
        with registration.held_back():
            pass

    # What is freed on this thread later would wait, too.
    gc.collect()
    monkeypatch.setattr(registration, what, slowly)
    traced = thread.submit(traced_and_dropped)
    assert begun.wait(TIMEOUT)
    changed = thread.submit(change)
    assert not concurrent.futures.wait([traced, changed], 0.2, concurrent.futures.FIRST_COMPLETED).done
    may_end.set()
    changed.result(TIMEOUT)
    traced.result(TIMEOUT)


def test_waiting_for_a_change_of_the_cluster_is_bounded(thread):
    with contextlib.closing(FunctionRegistration(longest_wait=0.05)) as registration, registration.held_back():
        thread.submit(traced_and_dropped).result(TIMEOUT)


def test_closing_restores_tensorflows_methods(monkeypatch):
    first = FunctionRegistration(longest_wait=TIMEOUT)
    first.close()
    second = FunctionRegistration(longest_wait=TIMEOUT)
    # One that is closed late does not change the present one.
    first.close()
    counted = []
    with monkeypatch.context() as patch:
        register = second.register
        patch.setattr(second, "register", lambda function: counted.append(register(function)))
        traced_and_dropped()
    assert len(counted) == 1
    second.close()
    assert (context.context().add_c_function, context.context().remove_function) == (second.register, second.remove)


def test_the_functions_of_one_that_is_built_are_registered_and_removed_with_it():
    weight = tf.Variable([2.0])

    @tf.function
    def step(x):
        for _ in tf.range(3):
            x = x * weight
        return x

    concrete = step.get_concrete_function(tf.ones([1]))
    copies = [packed_function(concrete) for _ in range(2)]
    libraries = [copy.graph.as_graph_def().library.function for copy in copies]
    # Its condition and its body, once.
    [names] = {tuple(sorted(each.signature.name for each in library)) for library in libraries}
    assert len(names) == 2
    for _ in range(2):
        assert all(map(context.context().has_function, names))
        copies.pop()
        gc.collect()
    assert not any(map(context.context().has_function, names))
