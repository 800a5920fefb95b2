"""Tests that functions may be traced, on any thread, while the cluster changes."""

import concurrent.futures
import gc
import threading

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from coordinator.ps_strategy.fusing.graph_copies import packed_function
from coordinator.ps_strategy.tensorflow_internals.functions import FunctionRegistration
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import unhealthy

TIMEOUT = 120.0


@pytest.fixture
def registration():
    registration = FunctionRegistration(longest_wait=TIMEOUT)
    yield registration
    registration.close()


@pytest.fixture
def tracing():
    """Traces a function on a new thread, and returns an event that is set when it is traced."""
    threads = []

    def trace(inside=lambda: None):
        traced = threading.Event()

        def run():
            @tf.function
            def function(x):
                inside()
                return x + 1

            function.get_concrete_function(tf.constant(1))
            traced.set()

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return traced

    yield trace
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def test_a_function_is_registered_when_the_change_of_the_cluster_is_over(registration, tracing):
    reached = threading.Event()
    with registration.held_back():
        traced = tracing(inside=reached.set)
        assert reached.wait(TIMEOUT)
        assert not traced.wait(0.2)
    assert traced.wait(TIMEOUT)


def traced_and_dropped():
    """Traces a function, deletes it, and returns its name."""
    name = tf.function(lambda: tf.constant(3)).get_concrete_function().name
    gc.collect()
    return name


def test_a_function_deleted_while_the_cluster_changes_is_removed_afterwards(registration, monkeypatch):
    removed = []
    remove = registration.remove
    monkeypatch.setattr(registration, "remove", lambda name: removed.append(name) or remove(name))
    with registration.held_back():
        name = traced_and_dropped()
        assert not removed
        assert context.context().has_function(name)
    assert name in removed
    assert not context.context().has_function(name)
    assert (later := traced_and_dropped()) in removed
    assert not context.context().has_function(later)


def test_a_function_is_removed_although_a_server_is_not_connected(registration, monkeypatch):
    def refuse(name):
        raise tf.errors.InvalidArgumentError(None, None, f"Client not found, of {name}")

    monkeypatch.setattr(registration, "remove", refuse)
    # An exception in a finalizer would be a warning, which is an error here.
    with registration.held_back():
        traced_and_dropped()
    traced_and_dropped()


@pytest.mark.parametrize("what", ["register", "remove"])
def test_a_change_of_the_cluster_waits_while_a_function_is_registered_or_removed(registration, monkeypatch, what):
    begun, may_end, ended, changed = (threading.Event() for _ in range(4))
    usual = getattr(registration, what)

    def slowly(function):
        begun.set()
        assert may_end.wait(TIMEOUT)
        usual(function)

    def trace_and_drop():
        traced_and_dropped()
        ended.set()

    def change():
        with registration.held_back():
            changed.set()

    monkeypatch.setattr(registration, what, slowly)
    threads = [threading.Thread(target=target) for target in (trace_and_drop, change)]
    threads[0].start()
    assert begun.wait(TIMEOUT)
    threads[1].start()
    assert not changed.wait(0.2)
    assert not ended.is_set()
    may_end.set()
    assert changed.wait(TIMEOUT)
    assert ended.wait(TIMEOUT)
    for thread in threads:
        thread.join(TIMEOUT)


def test_the_thread_that_changes_the_cluster_may_trace_functions(registration):
    with registration.held_back():
        assert tf.function(lambda: tf.constant(3))().numpy() == 3


def test_waiting_for_a_change_of_the_cluster_is_bounded(tracing):
    registration = FunctionRegistration(longest_wait=0.05)
    try:
        with registration.held_back():
            assert tracing().wait(TIMEOUT)
    finally:
        registration.close()


def test_closing_restores_tensorflows_methods():
    first = FunctionRegistration(longest_wait=TIMEOUT)
    first.close()
    with first.held_back():
        assert tf.function(lambda: tf.constant(3))().numpy() == 3
    second = FunctionRegistration(longest_wait=TIMEOUT)
    # One that is closed late does not change the present one.
    first.close()
    counted = []
    second.register, register = lambda function: counted.append(register(function)), second.register
    tf.function(lambda: tf.constant(4)).get_concrete_function()
    assert len(counted) == 1
    second.register = register
    second.close()
    assert context.context().add_c_function == register
    assert context.context().remove_function == second.remove


def test_closing_one_registration_does_not_disable_another(registration, tracing):
    FunctionRegistration(longest_wait=TIMEOUT).close()
    with registration.held_back():
        traced = tracing()
        assert not traced.wait(0.2)
    assert traced.wait(TIMEOUT)


@pytest.mark.cluster
@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.long)])
def test_functions_are_traced_while_a_worker_is_removed_and_added(shared_cluster, strategy, times):
    index = len(strategy.cluster.workers) - 1
    address = shared_cluster.spec["worker"][index]

    def reconnections():
        return strategy.cluster.statistics().workers[index].reconnections

    def remove_and_add():
        for _ in range(times):
            before = reconnections()
            strategy.cluster.move_worker(index, address)
            wait_until(lambda before=before: reconnections() > before)

    futures = []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        changes = pool.submit(remove_and_add)
        while not changes.done():
            number = len(futures)
            futures.append(strategy.schedule(tf.function(lambda x, n=number: x + n), args=(tf.constant(1),)))
    changes.result()
    assert [future.result(TIMEOUT) for future in futures] == [number + 1 for number in range(len(futures))]
    wait_until(lambda: not unhealthy(strategy))


def test_the_functions_of_one_that_is_built_are_registered_and_removed_with_it(registration, monkeypatch):
    registered = []
    register = registration.register
    monkeypatch.setattr(registration, "register", lambda function: registered.append(function) or register(function))
    weight = tf.Variable([2.0])

    @tf.function
    def step(x):
        for _ in tf.range(3):
            x = x * weight
        return x

    concrete = step.get_concrete_function(tf.ones([1]))
    traced = len(registered)
    copies = [packed_function(concrete) for _ in range(2)]
    [names] = {
        tuple(sorted(each.signature.name for each in copy.graph.as_graph_def().library.function)) for copy in copies
    }
    # Its condition and its body, once, and each copy itself.
    assert len(registered) - traced == len(names) + len(copies) == 4
    for _ in range(2):
        assert all(map(context.context().has_function, names))
        copies.pop()
        gc.collect()
    assert not any(map(context.context().has_function, names))
