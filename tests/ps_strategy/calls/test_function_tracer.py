"""Tests that a trace is reused for the calls that TensorFlow would use it for, and of calls of traced functions."""

import array
import gc
import logging
import weakref

import numpy as np
import pytest
import tensorflow as tf

from coordinator.errors import ClosureCancelledError
from coordinator.ps_strategy.calls import function_tracer, traced_function
from coordinator.ps_strategy.calls.function_tracer import RetraceWarnings, TraceCache, own_copy
from coordinator.ps_strategy.calls.traced_function import TracedFunction
from coordinator.ps_strategy.fusing.repeated_function import StackedInputs
from coordinator.ps_strategy.per_worker.resource import PerWorkerHandles
from coordinator.ps_strategy.tensorflow_internals.functions import CancellationManager, call_concrete
from coordinator.ps_strategy.tensorflow_internals.handles import new_handle, replace_handles
from tests.ps_strategy.gate import Gate
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


TIMEOUT, MANY = 120.0, 20


@pytest.fixture
def warnings(caplog):
    """A function that returns the warnings of this library so far."""
    caplog.set_level(logging.WARNING, logger="coordinator")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "coordinator"]


def test_the_warning_names_a_changing_python_number_with_its_values(strategy, warnings):
    class Model:
        @tf.function
        def scaled(self, x, rate, name="name"):
            return x * rate

    model = Model()
    for number in range(MANY + 5):
        assert bool(warnings()) == (number >= MANY)
        strategy.schedule(model.scaled, (tf.constant(1.0), float(number)))
    [warning] = warnings()
    assert "'scaled' was traced 20 times" in warning
    assert "The Python value of its argument 'rate' differs (0.0, 1.0, 2.0, ...)." in warning
    assert "Pass tf.constant(rate) or a NumPy value" in warning
    assert not any(f"'{name}'" in warning for name in ("self", "x", "name"))


def test_tensors_numpy_values_and_new_iterators_are_no_reason_to_warn(strategy, warnings):
    step = tf.function(lambda x, rate, iterator: x * rate + next(iterator))
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(1.0).repeat())
    for number in range(MANY + 5):
        strategy.schedule(step, (np.float32(number), tf.constant(float(number)), iter(dataset)))
    strategy.join(TIMEOUT)
    assert warnings() == []
    assert step.experimental_get_tracing_count() == 1


def test_the_warning_names_other_causes(warnings):
    paths = [{"path": [f"file {number}"], "flag": bool(number % 2)} for number in range(MANY)]
    for words, values in {
        "The dtype of its argument 'x' differs": [np.zeros(1, np.int32), *[np.zeros(1, np.int64)] * (MANY - 1)],
        "The shape of its argument 'x' differs ((0,), (1,), (2,), ...).": [np.zeros([size]) for size in range(MANY)],
        """argument "x['path'][0]" differs ('file 0', 'file 1', 'file 2', ...).""": paths,
        "'x' differs ('aaa": ["a" * 10_000 + str(number) for number in range(MANY)],
    }.items():
        retraced, function = RetraceWarnings(), tf.function(len)
        for value in values:
            retraced.note(function, "step", {"x": value})
        assert words in warnings()[-1]
        assert "flag" not in warnings()[-1]
        assert len(warnings()[-1]) < 500, "long values are abbreviated"


def test_a_function_of_which_a_call_failed_has_another_name_after_a_recovery(monkeypatch, recorded_functions):
    variable = tf.Variable(5)
    traced = TracedFunction(tf.function(lambda: variable + 1).get_concrete_function(), PerWorkerHandles())
    names = []

    def recorded(concrete, *given, **options):
        names.append(concrete.name)
        return call_concrete(concrete, *given, **options)

    monkeypatch.setattr(traced_function, "call_concrete", recorded)

    def run(value, manager=None):
        if value != variable.numpy():
            replace_handles([(variable, new_handle(variable))], recorded_functions)
            variable.assign(value)
        return traced.call_on(local_context(cancellation=manager)).numpy()

    assert [run(5), run(6)] == [6, 7]
    cancelled = CancellationManager()
    cancelled.cancel()
    with pytest.raises(ClosureCancelledError):
        run(6, cancelled)
    assert [run(7), run(7)] == [8, 8]
    assert names[0] == names[1] != names[-1] == names[-2]


COUNT = 8


@tf.function
def total(x):
    return tf.reduce_sum(x)


def scheduled_from_a_buffer(strategy, buffer, **settings):
    """Fills a buffer anew for each of some functions, all of which run later; returns what each has summed up."""

    def fill(number):
        buffer[:] = type(buffer)([number] * 4) if isinstance(buffer, list) else number

    gate = Gate(strategy)
    gate.occupy(len(strategy.cluster.workers))
    futures = []
    for number in range(COUNT):
        fill(number)
        futures.append(strategy.schedule(total, args=(buffer,), **settings))
    fill(COUNT)
    gate.open()
    return [float(np.sum(future.result(TIMEOUT))) for future in futures]


def test_an_array_that_is_filled_again_is_copied(strategy):
    for settings in ({}, {"steps": 2}, {"fetch": False}):
        found = scheduled_from_a_buffer(strategy, np.zeros(4, np.float32), **settings)
        assert found == [4.0 * number * settings.get("steps", 1) for number in range(COUNT)], settings
    for buffer in ([0] * 4, np.zeros(2**17, np.float32)):
        assert scheduled_from_a_buffer(strategy, buffer) == [float(len(buffer) * number) for number in range(COUNT)]


def test_whatever_holds_an_array_is_copied_and_everything_else_passed_as_it_is(strategy):
    values, large = np.arange(3), np.zeros(2**17, np.float32)
    for value in (values, np.ma.masked_array([1, 2], [True, False]), array.array("f", [1.0, 2.0])):
        copy = own_copy(value)
        assert isinstance(copy, np.ndarray), value
        np.testing.assert_array_equal(copy, np.asarray(value))
        assert not np.shares_memory(copy, np.asarray(value)), value
    assert own_copy(bytearray(b"ab")) == b"ab"
    with strategy.scope():
        variable = tf.Variable(1.0)
    constants = [1, 2.0, "text", b"bytes", None, True, np.float32(3)]
    for value in (*constants, variable, tf.constant([1.0]), tf.ragged.constant([[1], [2, 3]])):
        assert own_copy({"x": [value]})["x"][0] is value
    assert own_copy({"x": [values]})["x"][0] is not values
    with tf.device(strategy.cluster.workers[0].device):
        copy = own_copy(large)
    large[:] = 1
    assert isinstance(copy, tf.Tensor)
    assert "/job:chief" in copy.device
    assert not copy.numpy().any()


def test_a_function_that_returns_what_cannot_leave_its_worker_is_refused(strategy):
    with strategy.scope():
        variable = tf.Variable(1.0)
    for make in (
        lambda: {"all": [variable.handle]},
        lambda: iter(tf.data.Dataset.range(2)),
        lambda: tf.data.Dataset.range(2),
        lambda: tf.experimental.Optional.from_value(1),
        lambda: tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=5, element_dtype=tf.float32),
    ):
        for fetch in (True, False):
            with pytest.raises(TypeError, match="It cannot leave the worker"):
                strategy.schedule(tf.function(make, autograph=False), fetch=fetch)
        # A function that does the same inside is not.
        inside = tf.function(lambda made=make: (made(), 3)[1], autograph=False)
        assert strategy.schedule(inside).result(TIMEOUT) == 3
