"""Tests of the cache of traces: a trace is reused for exactly the calls that TensorFlow would use it for."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.calls import function_tracer
from coordinator.ps_strategy.calls.function_tracer import FunctionTracer, TraceCache
from coordinator.ps_strategy.calls.traced_function import TracedFunction
from coordinator.ps_strategy.fusing.repeated_function import StackedInputs
from coordinator.ps_strategy.per_worker.dataset import PerWorkerIterator
from coordinator.ps_strategy.per_worker.resource import PerWorkerHandles
from tests.ps_strategy.local_context import local_context

SAME = {
    "nothing": ((), ()),
    "tensors": ((tf.constant([1.0]), tf.constant("a")), (tf.constant([2.0]), tf.constant("b"))),
    "arrays": ((np.zeros([2, 3]),), (np.ones([2, 3]),)),
    "lists of arrays": (([np.zeros(2), (np.zeros(3), 1)],), ([np.ones(2), (np.ones(3), 1)],)),
    "a dictionary": (({"x": np.zeros(2), "y": "text"},), ({"x": np.ones(2), "y": "text"},)),
    "Python values": ((1, 2.0, "three", None, b"four"), (1, 2.0, "three", None, b"four")),
}

OTHER = {
    "another shape": (np.zeros(2), np.zeros(3)),
    "another type of elements": (np.zeros(2, np.float32), np.zeros(2, np.float64)),
    "another value": (1, 2),
    "an equal value of another type": (1, True),
    "an equal number of another type": (1, 1.0),
    "a tuple for a list": ([1], (1,)),
    "other keys": ({"x": 1}, {"y": 1}),
    "a tensor for a number": (1, tf.constant(1)),
    "one level less": ([[1]], [1]),
}

UNKNOWN = {
    "a ragged tensor": lambda: tf.ragged.constant([[1.0], []]),
    "a NumPy number": lambda: np.float32(1.0),
    "objects": lambda: np.array([b"a", "b"], object),
    "a function": lambda: len,
    "a subclass of list": lambda: type("Own", (list,), {})([1]),
}


@pytest.fixture
def function():
    return tf.function(lambda *args: tf.constant(1.0))


@pytest.fixture
def traced(function):
    return TracedFunction(function.get_concrete_function(), PerWorkerHandles())


def test_a_variable_is_known_by_itself_alone(function, traced):
    cache, known, other = TraceCache(), tf.Variable(1.0), tf.Variable(1.0)
    cache.add(function, [known], traced, ())
    assert cache.find(function, [known]) is not None
    assert cache.find(function, [other]) is None


@pytest.mark.parametrize("case", SAME)
def test_a_call_of_the_same_kind_reuses_the_trace(function, traced, case, monkeypatch):
    # Without a strategy tensors are on no client.
    monkeypatch.setattr(function_tracer, "is_stackable", lambda _: True)
    first, again = SAME[case]
    cache = TraceCache()
    assert cache.find(function, first) is None
    cache.add(function, first, traced, ("left out",))
    call = cache.find(function, again)
    assert call.function is traced
    assert call.args[-1] == "left out"
    passed, given = tf.nest.flatten([*call.args[:-1]]), tf.nest.flatten([*again])
    # Arrays are copied.
    assert all(one is other or np.array_equal(one, other) for one, other in zip(passed, given, strict=True))
    assert call.fusion_key == cache.find(function, first).fusion_key


def test_an_iterator_may_be_a_default_value(function, traced):
    iterator = PerWorkerIterator("numbers", tf.TensorSpec([], tf.int64), lambda _: tf.data.Dataset.range(3), 1, None)
    cache = TraceCache()
    cache.add(function, [], traced, ({"numbers": iterator},))
    assert list(cache.find(function, []).iterators) == [iterator]
    assert cache.find(function, []).most_fused_on(0) == 0, "it is not known how many elements it has"


def test_tensors_on_other_devices_are_fused_only_if_they_are_the_same(function, traced, monkeypatch):
    one, other = tf.constant(1.0), tf.constant(2.0)
    cache = TraceCache()
    cache.add(function, [one], traced, ())
    monkeypatch.setattr(function_tracer, "is_stackable", lambda _: True)
    assert cache.find(function, [one]).fusion_key == cache.find(function, [other]).fusion_key
    monkeypatch.setattr(function_tracer, "is_stackable", lambda _: False)
    assert cache.find(function, [one]).fusion_key == cache.find(function, [one]).fusion_key
    assert cache.find(function, [one]).fusion_key != cache.find(function, [other]).fusion_key


@pytest.mark.parametrize("case", OTHER)
def test_a_call_of_another_kind_does_not_reuse_the_trace(function, traced, case):
    first, other = OTHER[case]
    cache = TraceCache()
    cache.add(function, [first], traced, ())
    assert cache.find(function, [first]) is not None
    assert cache.find(function, [other]) is None
    assert cache.find(function, [first, first]) is None


@pytest.mark.parametrize("case", UNKNOWN)
def test_arguments_that_a_trace_may_depend_on_otherwise_are_never_cached(function, traced, case):
    argument = UNKNOWN[case]()
    cache = TraceCache()
    cache.add(function, [argument], traced, ())
    assert cache.find(function, [argument]) is None
    cache.add(function, [[argument]], traced, ())
    assert cache.find(function, [[argument]]) is None


def test_only_functions_and_lists_of_arguments_are_looked_up(function, traced):
    cache = TraceCache()
    cache.add(function, [], traced, ())
    assert cache.find({}, []) is None
    assert cache.find("text", []) is None
    assert cache.find(function, np.zeros(0)) is None
    assert cache.find(function, 5) is None


def test_nothing_is_found_inside_of_a_graph_or_after_the_cache_was_cleared(function, traced):
    cache = TraceCache()
    cache.add(function, [], traced, ())
    with tf.Graph().as_default():
        assert cache.find(function, []) is None
    assert cache.find(function, []) is not None
    cache.clear()
    assert cache.find(function, []) is None


def test_neither_a_function_nor_its_trace_is_kept_alive():
    cache = TraceCache()

    @tf.function
    def function():
        return tf.constant(1.0)

    traced = TracedFunction(function.get_concrete_function(), PerWorkerHandles())
    cache.add(function, [], traced, ())
    alive = weakref.ref(function), weakref.ref(traced)
    assert cache.find(function, []).function is traced
    del function, traced
    gc.collect()
    assert [each() for each in alive] == [None, None]


def test_a_trace_is_freed_with_its_function_without_garbage_collection():
    variable = tf.Variable(1.0)
    function = tf.function(lambda: variable.assign_add(1.0))
    concrete = function.get_concrete_function()
    function.get_concrete_function()
    traced = TracedFunction(concrete, PerWorkerHandles())
    context = local_context()
    assert traced.call_fused(context, StackedInputs.of_steps([[], []])) == [2.0, 3.0]
    cache = TraceCache()
    cache.add(function, [], traced, ())
    alive = weakref.ref(function), weakref.ref(traced), weakref.ref(concrete)
    gc.collect()
    gc.disable()
    try:
        del function, traced, concrete
        assert [each() for each in alive] == [None] * 3
    finally:
        gc.enable()


def test_the_number_of_cached_traces_of_a_function_is_bounded(function, traced):
    cache = TraceCache()
    for number in range(1000):
        cache.add(function, [number], traced, ())
    assert sum(cache.find(function, [number]) is not None for number in range(1000)) <= 64


def test_a_repeated_call_uses_the_trace_that_tensorflow_would_choose(strategy):
    traces = []

    @tf.function
    def fn(x, y=2.0, *, z=3.0):
        traces.append((x, y, z))
        return x * y * z

    def result(*args, **kwargs):
        return float(strategy.schedule(fn, args, kwargs).result(120))

    for _ in range(3):
        assert result(1.0) == 6
        assert result(2.0) == 12
        assert result(tf.constant(4.0)) == 24
        assert result(tf.constant(5.0), 1.0) == 15
        assert result(tf.constant(5.0), z=1.0) == 10
        assert result(1.0, 1.0) == 3
    assert len(traces) == 6
    strategy.extended.services.retrace()
    assert result(1.0) == 6
    assert len(traces) == 7
    assert result(1.0) == 6
    assert len(traces) == 7


def test_an_iterator_is_freed_although_it_was_scheduled_before(strategy):
    @tf.function
    def take(iterator):
        return next(iterator)

    def schedule():
        iterator = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(10).repeat()))
        for _ in range(5):
            strategy.schedule(take, (iterator,))
        strategy.join(120)
        return weakref.ref(iterator)

    alive = [schedule() for _ in range(3)]
    gc.collect()
    # A worker's thread may hold the last call of each until it takes another closure.
    assert sum(each() is not None for each in alive) <= 1


@pytest.fixture
def traced_by() -> Callable[[FunctionTracer, Any], Any]:
    """Traces a function of one number; returns the concrete function."""
    return lambda tracer, function: tracer.trace(function, (1,), {}, contextlib.nullcontext).concrete


def test_reset_replaces_a_traced_function_by_one_untraced_copy(traced_by) -> None:
    traces: list[int] = []

    @tf.function
    def function(number: int) -> tf.Tensor:
        traces.append(number)
        return tf.constant(number)

    tracer = FunctionTracer(PerWorkerHandles())
    own = traced_by(tracer, function)
    assert own is function.get_concrete_function(1)
    tracer.reset()
    copy = traced_by(tracer, function)
    assert copy is not own
    assert traced_by(tracer, function) is copy
    assert traces == [1, 1]
    assert own is function.get_concrete_function(1)
    tracer.reset()
    assert traced_by(tracer, function) not in (own, copy)


def test_reset_keeps_a_function_that_was_not_traced_yet(traced_by) -> None:
    function = tf.function(lambda number: tf.constant(number) + 1)
    tracer = FunctionTracer(PerWorkerHandles())
    tracer.reset()
    assert traced_by(tracer, function) is function.get_concrete_function(1)
    tracer.reset()
    assert traced_by(tracer, function) is not function.get_concrete_function(1)


def test_reset_does_not_keep_the_object_of_a_method_alive(traced_by) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.step = tf.function(self._step)

        def _step(self, number: int) -> tf.Tensor:
            return tf.constant(number)

    trainer, tracer = Trainer(), FunctionTracer(PerWorkerHandles())
    traced_by(tracer, trainer.step)
    tracer.reset()
    alive = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert alive() is None
