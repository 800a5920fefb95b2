"""Tests that the function of a fused call is built once, although several workers need it."""

import concurrent.futures
import threading

import pytest
import tensorflow as tf

from coordinator.ps_strategy.calls import traced_function
from coordinator.ps_strategy.calls.traced_function import TracedFunction
from coordinator.ps_strategy.fusing.repeated_function import StackedInputs
from coordinator.ps_strategy.per_worker.resource import PerWorkerHandles
from tests.ps_strategy.local_context import local_context

TIMEOUT = 120.0
WORKERS = 3


class DelayedBuild:
    """Delays the building of fused functions, and counts it."""

    def __init__(self, monkeypatch):
        self.may_continue = threading.Event()
        self.begun = threading.Event()
        self.count = 0
        self.error = ValueError("no such operation")
        self._make = traced_function.RepeatedFunction
        monkeypatch.setattr(traced_function, "RepeatedFunction", self)

    def __call__(self, *arguments):
        self.count += 1
        self.begun.set()
        assert self.may_continue.wait(TIMEOUT)
        if self.error is not None:
            raise self.error
        return self._make(*arguments)


@pytest.fixture
def build(monkeypatch):
    build = DelayedBuild(monkeypatch)
    yield build
    build.may_continue.set()


@pytest.fixture
def call():
    """Starts a call of two steps, as a worker does, and returns its future. Each step returns 3."""
    function = tf.function(lambda: tf.constant(3.0))
    traced = TracedFunction(function.get_concrete_function(), PerWorkerHandles())
    context = local_context()
    with concurrent.futures.ThreadPoolExecutor(2 * WORKERS) as pool:
        yield lambda: pool.submit(traced.call_fused, context, StackedInputs.of_steps([[], []]))


def test_a_failed_build_fails_all_waiting_calls_and_the_next_call_builds_once(build, call):
    calls = [call() for _ in range(WORKERS)]
    assert build.begun.wait(TIMEOUT)
    build.may_continue.set()
    assert {str(each.exception(TIMEOUT)) for each in calls} == {"no such operation"}
    build.error, build.count = None, 0
    assert [call().result(TIMEOUT) for _ in range(2)] == [[3.0, 3.0]] * 2
    assert build.count == 1
