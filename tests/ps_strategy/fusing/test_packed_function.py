"""Tests of functions that are called often without fusing: they do the same with packed messages."""

import collections
import threading

import pytest
import tensorflow as tf

from coordinator.ps_strategy.calls import traced_function
from coordinator.ps_strategy.calls.traced_function import TracedFunction
from coordinator.ps_strategy.fusing import graph_copies
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import builds_of

TIMEOUT = 120.0
Pair = collections.namedtuple("Pair", ["sum", "more"])


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Makes the messages of a function be packed when it is called for the third time."""
    monkeypatch.setattr(graph_copies, "_CALLS_BEFORE_PACKING", 3)


@pytest.fixture
def called(monkeypatch):
    """A list with, for each call so far, whether it was of the packed function; without those that create datasets."""
    called = []
    stock = vars(TracedFunction)["_run"]

    def noted(self, context, captures, concrete, inputs, stands_for=None):
        if all(output.dtype != tf.variant for output in concrete.outputs):
            called.append(stands_for not in (None, concrete))
        return stock(self, context, captures, concrete, inputs, stands_for)

    monkeypatch.setattr(TracedFunction, "_run", noted)
    return called


@pytest.fixture
def pair(strategy):
    """Two variables on one parameter server, whose messages can be packed."""
    with strategy.scope():
        first = tf.Variable([1.0, 2.0])
        while True:
            second = tf.Variable([[3.0]])
            if second.device == first.device:
                return first, second


def until_packed(strategy, fn, called, arguments=lambda _: (), worker=1):
    """Runs a function on a worker until it runs there with packed messages, and twice more; returns the results."""
    results = []

    def run():
        results.append(strategy.schedule(fn, arguments(len(results)), worker=worker).result(TIMEOUT))

    wait_until(lambda: (run(), called[-1])[1], TIMEOUT)
    run()
    run()
    return results


def test_a_packed_function_has_the_effects_and_results_of_the_original(strategy, pair, called):
    first, second = pair

    @tf.function
    def step(x):
        total = tf.reduce_sum(first) * x + second
        first.assign_add([1.0, 1.0])
        second.assign_sub(total * 0.5)
        return {"pair": Pair(total, None), "rows": tf.RaggedTensor.from_row_lengths(first + x, [2, 0])}

    found = until_packed(strategy, step, called, lambda number: (tf.constant(float(number % 3)),))
    assert called == [False] * (len(found) - 3) + [True] * 3
    a, b = [1.0, 2.0], 3.0
    for number, result in enumerate(found):
        x = float(number % 3)
        total = sum(a) * x + b
        a, b = [each + 1 for each in a], b - total * 0.5
        assert result["pair"] == Pair(pytest.approx(total), None)
        assert result["rows"].to_list() == [pytest.approx([each + x for each in a]), []]
    assert second.numpy().item() == pytest.approx(b)


def test_a_packed_function_reads_finite_data_to_its_end(strategy, pair, called):
    def iterator_of(data):
        # Data of unknown size is not fused.
        return iter(strategy.experimental_distribute_dataset(data.filter(lambda _: True)))

    endless, iterator = iterator_of(tf.data.Dataset.range(4).repeat()), iterator_of(tf.data.Dataset.range(4))
    first, second = pair

    @tf.function
    def step(iterator):
        total = second[0, 0] * first[0]
        first.assign_add([0.0, 1.0])
        return tf.cast(next(iterator), tf.float32) * total

    for worker in range(2):
        found = until_packed(strategy, step, called, lambda _: (endless,), worker)
        # Nothing is taken while the function is prepared.
        assert found == [[0.0, 3.0, 6.0, 9.0][number % 4] for number in range(len(found))]
        futures = [strategy.schedule(step, (iterator,), worker=worker) for _ in range(4)]
        assert [future.result(TIMEOUT) for future in futures] == [0.0, 3.0, 6.0, 9.0]
        error = strategy.schedule(step, (iterator,), worker=worker).exception(TIMEOUT)
        assert isinstance(error, tf.errors.OutOfRangeError)
        with pytest.raises(tf.errors.OutOfRangeError):
            strategy.join(TIMEOUT)


def test_a_function_that_cannot_be_copied_runs_unchanged(strategy, pair, called, monkeypatch, caplog):
    first, second = pair

    def broken(*_):
        raise ValueError("no copies today")

    monkeypatch.setattr(traced_function, "packed_function", broken)
    step = tf.function(lambda x: first[0] * second[0, 0] * x)
    for _ in range(2):
        futures = [strategy.schedule(step, (tf.constant(2.0),), worker=1) for _ in range(5)]
        assert [future.result(TIMEOUT) for future in futures] == [6.0] * 5
        # Waits until all that was requested is built.
        built = threading.Event()
        builds_of(strategy).request(built.set)
        assert built.wait(TIMEOUT)
    assert not any(called)
    [record] = caplog.records
    assert "could not be built; the function runs as before" in record.message
    assert "no copies today" in caplog.text
