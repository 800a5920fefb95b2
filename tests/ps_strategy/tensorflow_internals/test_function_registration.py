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
    registration = FunctionRegistration(longest_wait=0.05)
    try:
        with registration.held_back():
            thread.submit(traced_and_dropped).result(TIMEOUT)
    finally:
        registration.close()


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


@pytest.mark.cluster
def test_functions_are_traced_while_a_worker_is_removed_and_added(shared_cluster, strategy):
    index = len(strategy.cluster.workers) - 1

    def reconnections():
        return strategy.cluster.statistics().workers[index].reconnections

    def remove_and_add():
        before = reconnections()
        strategy.cluster.move_worker(index, shared_cluster.spec["worker"][index])
        wait_until(lambda: reconnections() > before)

    futures = []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        changes = pool.submit(remove_and_add)
        while not changes.done():
            number = len(futures)
            futures.append(strategy.schedule(tf.function(lambda x, n=number: x + n), args=(tf.constant(1),)))
    changes.result()
    assert [future.result(TIMEOUT) for future in futures] == [number + 1 for number in range(len(futures))]
    wait_until(lambda: not unhealthy(strategy))


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
