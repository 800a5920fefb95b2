"""Tests that a function of which a call has failed is called by another name after a recovery."""

import pytest
import tensorflow as tf

from coordinator.errors import ClosureCancelledError
from coordinator.ps_strategy.calls import traced_function
from coordinator.ps_strategy.calls.traced_function import TracedFunction
from coordinator.ps_strategy.per_worker.resource import PerWorkerHandles
from coordinator.ps_strategy.tensorflow_internals.functions import CancellationManager, call_concrete
from coordinator.ps_strategy.tensorflow_internals.handles import new_handle, replace_handles
from tests.ps_strategy.local_context import local_context


def test_a_traced_function_runs_under_another_name_with_the_new_variable(monkeypatch, recorded_functions):
    variable = tf.Variable(5)
    traced = TracedFunction(tf.function(lambda: variable + 1).get_concrete_function(), PerWorkerHandles())
    names = []

    def recorded(concrete, *given, **options):
        names.append(concrete.name)
        return call_concrete(concrete, *given, **options)

    monkeypatch.setattr(traced_function, "call_concrete", recorded)

    def run(manager):
        return traced.call_on(local_context(cancellation=manager)).numpy()

    def recover(value):
        replace_handles([(variable, new_handle(variable))], recorded_functions)
        variable.assign(value)

    assert run(CancellationManager()) == 6
    recover(6)
    assert run(CancellationManager()) == 7
    assert len(set(names)) == 1
    cancelled = CancellationManager()
    cancelled.cancel()
    with pytest.raises(ClosureCancelledError):
        run(cancelled)
    recover(7)
    assert run(CancellationManager()) == run(CancellationManager()) == 8
    assert len(set(names)) == 2
    assert names[-1] == names[-2] != names[-3]
