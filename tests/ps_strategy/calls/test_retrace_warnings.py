"""Tests of the warning about a function that is traced for each call, which names the argument that causes it."""

import logging

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
def scheduled(strategy):
    """Schedules a function once with each of some arguments, and waits until all calls have finished."""

    def schedule(fn, arguments):
        for args in arguments:
            strategy.schedule(fn, args)
        strategy.join(120)

    return schedule


def test_the_warning_names_a_changing_python_number_with_its_values(scheduled, warnings):
    class Model:
        @tf.function
        def scaled(self, x, rate, name="name"):
            return x * rate

    model = Model()
    scheduled(model.scaled, [(tf.constant(1.0), float(number)) for number in range(MANY - 1)])
    assert warnings() == []
    scheduled(model.scaled, [(tf.constant(1.0), float(number)) for number in range(MANY - 1, MANY + 5)])
    [warning] = warnings()
    assert "'scaled' was traced 20 times" in warning
    assert "The Python value of its argument 'rate' differs (0.0, 1.0, 2.0, ...)." in warning
    assert "Pass tf.constant(rate) or a NumPy value" in warning
    assert not any(f"'{name}'" in warning for name in ("self", "x", "name"))


def test_tensors_numpy_values_and_new_iterators_are_no_reason_to_warn(strategy, scheduled, warnings):
    @tf.function
    def step(x, rate, iterator):
        return x * rate + next(iterator)

    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(1.0).repeat())
    scheduled(step, [(np.float32(number), tf.constant(float(number)), iter(dataset)) for number in range(MANY + 5)])
    assert warnings() == []
    assert step.experimental_get_tracing_count() == 1


def test_the_warning_names_other_causes(warnings):
    paths = [{"path": [f"file {number}"], "flag": bool(number % 2)} for number in range(MANY)]
    for words, values in {
        "The dtype of its argument 'x' differs": [np.zeros(1, np.int32), *[np.zeros(1, np.int64)] * (MANY - 1)],
        "The shape of its argument 'x' differs ((0,), (1,), (2,), ...).": [np.zeros([size]) for size in range(MANY)],
        "The structure of its argument 'x' differs": [[1] * number for number in range(MANY)],
        """argument "x['path'][0]" differs ('file 0', 'file 1', 'file 2', ...).""": paths,
        # Long values are abbreviated.
        "'x' differs ('aaa": ["a" * 10_000 + str(number) for number in range(MANY)],
    }.items():
        retraced, function = RetraceWarnings(), tf.function(len)
        for value in values:
            retraced.note(function, "step", {"x": value})
        assert words in warnings()[-1]
        assert "flag" not in warnings()[-1]
        assert len(warnings()[-1]) < 500
