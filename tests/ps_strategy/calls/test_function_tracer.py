"""Tests of the cache of traces: a trace is reused for exactly the calls that TensorFlow would use it for."""

import contextlib
import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.calls import function_tracer
from coordinator.ps_strategy.calls.function_tracer import FunctionTracer, TraceCache
from coordinator.ps_strategy.calls.traced_function import TracedFunction
from coordinator.ps_strategy.fusing.repeated_function import StackedInputs
from coordinator.ps_strategy.per_worker.resource import PerWorkerHandles
from tests.ps_strategy.local_context import local_context


@pytest.fixture
def function():
    return tf.function(lambda *args: tf.constant(1.0))


@pytest.fixture
def traced(function):
    return TracedFunction(function.get_concrete_function(), PerWorkerHandles())


def test_a_call_of_the_same_kind_reuses_the_trace(function, traced, monkeypatch):
    # Without a strategy tensors are on no client.
    monkeypatch.setattr(function_tracer, "is_stackable", lambda _: True)
    variable = tf.Variable(1.0)
    for first, again in [
        ((), ()),
        ((tf.constant([1.0]), tf.constant("a")), (tf.constant([2.0]), tf.constant("b"))),
        (([np.zeros(2), (np.zeros(3), 1)],), ([np.ones(2), (np.ones(3), 1)],)),
        (({"x": np.zeros(2), "y": "text"},), ({"x": np.ones(2), "y": "text"},)),
        ((1, 2.0, "three", None, b"four"), (1, 2.0, "three", None, b"four")),
        ((variable,), (variable,)),
    ]:
        cache = TraceCache()
        assert cache.find(function, first) is None, first
        cache.add(function, first, traced, ("left out",))
        call = cache.find(function, again)
        assert call.function is traced, first
        assert call.args[-1] == "left out"
        passed, given = tf.nest.flatten([*call.args[:-1]]), tf.nest.flatten([*again])
        # Arrays are copied.
        assert all(one is other or np.array_equal(one, other) for one, other in zip(passed, given, strict=True))
        assert call.fusion_key == cache.find(function, first).fusion_key


def test_a_call_of_another_kind_does_not_reuse_the_trace(function, traced):
    for first, other in [
        (np.zeros(2), np.zeros(3)),
        (np.zeros(2, np.float32), np.zeros(2, np.float64)),
        (1, 2),
        (1, True),
        (1, 1.0),
        ([1], (1,)),
        ({"x": 1}, {"y": 1}),
        (1, tf.constant(1)),
        ([[1]], [1]),
        (tf.Variable(1.0), tf.Variable(1.0)),
    ]:
        cache = TraceCache()
        cache.add(function, [first], traced, ())
        assert cache.find(function, [first]) is not None, first
        assert cache.find(function, [other]) is None, other
        assert cache.find(function, [first, first]) is None, first


def test_arguments_that_a_trace_may_depend_on_otherwise_are_never_cached(function, traced):
    own = type("Own", (list,), {})([1])
    for argument in (tf.ragged.constant([[1.0], []]), np.float32(1.0), np.array([b"a", "b"], object), len, own):
        cache = TraceCache()
        for args in ([argument], [[argument]]):
            cache.add(function, args, traced, ())
            assert cache.find(function, args) is None, argument


def test_a_trace_is_freed_with_its_function_without_garbage_collection():
    variable = tf.Variable(1.0)
    function = tf.function(lambda: variable.assign_add(1.0))
    concrete = function.get_concrete_function()
    function.get_concrete_function()
    traced = TracedFunction(concrete, PerWorkerHandles())
    assert traced.call_fused(local_context(), StackedInputs.of_steps([[], []])) == [2.0, 3.0]
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


def test_a_repeated_call_uses_the_trace_that_tensorflow_would_choose(strategy):
    traces = []

    @tf.function
    def fn(x, y=2.0, *, z=3.0):
        traces.append((x, y, z))
        return x * y * z

    def result(*args, **kwargs):
        return float(strategy.schedule(fn, args, kwargs).result(120))

    for _ in range(2):
        assert [result(1.0), result(tf.constant(4.0)), result(tf.constant(5.0), 1.0)] == [6, 24, 15]
        assert [result(tf.constant(5.0), z=1.0), result(1.0, 1.0)] == [10, 3]
    assert len(traces) == 5
    strategy.extended.services.retrace()
    assert [result(1.0), result(1.0), len(traces)] == [6, 6, 6]


def traced_by(tracer, function):
    """Traces a function of one number; returns the concrete function."""
    return tracer.trace(function, (1,), {}, contextlib.nullcontext).concrete


def test_reset_replaces_a_traced_function_by_one_untraced_copy() -> None:
    traces: list[int] = []

    @tf.function
    def function(number: int) -> tf.Tensor:
        traces.append(number)
        return tf.constant(number)

    tracer = FunctionTracer(PerWorkerHandles())
    tracer.reset()
    own = traced_by(tracer, function)
    assert own is function.get_concrete_function(1), "it was not traced before"
    tracer.reset()
    copy = traced_by(tracer, function)
    assert traced_by(tracer, function) is copy is not own
    assert traces == [1, 1]
    assert own is function.get_concrete_function(1)
    tracer.reset()
    assert traced_by(tracer, function) not in (own, copy)
