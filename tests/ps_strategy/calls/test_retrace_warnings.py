"""Tests of the warning about a function that is traced for each call, which names the argument that causes it."""

import gc
import logging
import weakref

import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.calls.function_tracer import RetraceWarnings

MANY = 20


@pytest.fixture
def warnings(caplog):
    """A function that returns the warnings of this library so far."""
    caplog.set_level(logging.WARNING, logger="coordinator")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "coordinator"]


@pytest.fixture
def function():
    return tf.function(lambda *args: tf.constant(1.0))


@pytest.fixture
def scheduled(strategy):
    """Schedules a function once with each of some arguments, and waits until all calls have finished."""

    def schedule(fn, arguments):
        for args in arguments:
            strategy.schedule(fn, args)
        strategy.join(120)

    return schedule


@tf.function
def scaled(x, rate, name="name"):
    return x * rate


def test_the_warning_names_a_changing_python_number_with_its_values(scheduled, warnings):
    scheduled(scaled, [(tf.constant(1.0), float(number)) for number in range(MANY - 1)])
    assert warnings() == []
    scheduled(scaled, [(tf.constant(1.0), float(number)) for number in range(3 * MANY)])
    [warning] = warnings()
    assert "function 'scaled' was traced 20 times" in warning
    assert "The Python value of its argument 'rate' differs (0.0, 1.0, 2.0, ...)." in warning
    assert "Pass tf.constant(rate) or a NumPy value" in warning
    assert "'x'" not in warning
    assert "'name'" not in warning


def test_tensors_and_numpy_values_need_one_trace(strategy, scheduled, warnings):
    @tf.function
    def step(x, rate):
        return x * rate

    scheduled(step, [(np.float32(number), tf.constant(float(number))) for number in range(2 * MANY)])
    assert warnings() == []
    assert step.experimental_get_tracing_count() == 1


@pytest.mark.long
def test_the_warning_names_a_changing_string_and_its_place(strategy, warnings):
    @tf.function
    def step(x, *, config):
        return x

    for number in range(MANY):
        strategy.schedule(step, (1.0,), {"config": {"path": [f"file {number}"], "flag": bool(number % 2)}})
    strategy.join(120)
    [warning] = warnings()
    place = "config['path'][0]"
    assert f"The Python value of its argument {place!r} differs ('file 0', 'file 1', 'file 2', ...)." in warning
    assert f"Pass tf.constant({place}): one trace" in warning
    assert "flag" not in warning


@pytest.mark.long
def test_the_warning_names_changing_shapes(scheduled, warnings):
    @tf.function
    def step(x, y):
        return tf.reduce_sum(x) + y

    scheduled(step, [(np.zeros([number], np.float32), 1.0) for number in range(MANY)])
    [warning] = warnings()
    assert "The shape of its argument 'x' differs ((0,), (1,), (2,), ...)." in warning
    assert "input_signature or reduce_retracing=True, or pad" in warning
    assert "'y'" not in warning


def test_the_warning_names_a_method_without_its_object(scheduled, warnings):
    class Model:
        @tf.function
        def step(self, rate):
            return tf.constant(1.0) * rate

    scheduled(Model().step, [(number,) for number in range(MANY)])
    [warning] = warnings()
    assert "'step' was traced 20 times" in warning
    assert "'rate' differs (0, 1, 2, ...)" in warning


def test_new_iterators_over_data_of_one_kind_are_no_reason_to_warn(strategy, scheduled, warnings):
    @tf.function
    def take(iterator):
        return next(iterator)

    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(10).repeat())
    scheduled(take, [(iter(dataset),) for _ in range(MANY + 5)])
    assert warnings() == []


def test_a_request_to_trace_all_functions_again_is_no_reason_to_warn(strategy, scheduled, warnings):
    @tf.function
    def step(rate):
        return tf.constant(1.0) * rate

    for _ in range(MANY):
        scheduled(step, [(1,), (2,)])
        strategy.extended.services.retrace()
    assert warnings() == []
    scheduled(step, [(number,) for number in range(MANY)])
    assert len(warnings()) == 1
    strategy.extended.services.retrace()
    scheduled(step, [(number,) for number in range(MANY)])
    assert len(warnings()) == 1


def test_without_a_visible_difference_the_warning_has_only_the_trace_count(function, warnings):
    retraced = RetraceWarnings()
    for _ in range(MANY):
        retraced.note(function, "step", {"x": 1})
    [warning] = warnings()
    assert warning.endswith("'step' was traced 20 times, and a trace takes longer than many calls.")


def test_the_warning_names_other_causes(warnings):
    objects = [object() for _ in range(MANY)]
    causes = {
        "dtype": [np.zeros(1, np.int32), *[np.zeros(1, np.int64)] * (MANY - 1)],
        "identity": objects,
        "structure": [[1] * number for number in range(MANY)],
        "element_spec": [tf.data.Dataset.from_tensors(np.zeros([number])) for number in range(MANY)],
    }
    for cause, values in causes.items():
        retraced, function = RetraceWarnings(), tf.function(len)
        for value in values:
            retraced.note(function, "step", {"x": value})
        assert f"The {cause} of its argument 'x' differs" in warnings()[-1]


def test_long_values_are_abbreviated_and_still_distinguishable(function, warnings):
    retraced = RetraceWarnings()
    for number in range(MANY):
        retraced.note(function, "step", {"text": "a" * 10_000 + str(number)})
    [warning] = warnings()
    assert "'text' differs ('aaa" in warning
    assert len(warning) < 500


def test_neither_functions_nor_arguments_are_kept_alive(warnings):
    class Argument:
        pass

    retraced = RetraceWarnings()
    function, argument = tf.function(lambda: tf.constant(1.0)), Argument()
    retraced.note(function, "step", {"x": argument, "y": [argument]})
    alive = weakref.ref(function), weakref.ref(argument)
    del function, argument
    gc.collect()
    assert [each() for each in alive] == [None, None]
    assert warnings() == []
