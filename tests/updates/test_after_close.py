"""Tests of the methods of a rule after its strategy was closed."""

import dataclasses

import pytest
import tensorflow as tf

import coordinator
from coordinator.updates import Asynchronous, ModelAverage, Synchronous
from tests.program_runner import ProgramRunner
from tests.updates.descent import descend


def test_methods_of_a_rule_first_check_whether_the_strategy_is_closed(strategy, monkeypatch) -> None:
    with strategy.scope():
        variables = [tf.Variable(0.0)]
        rules = [
            Asynchronous(descend, variables, learning_rate=1.0),
            Synchronous(descend, variables, grads_to_wait=2, learning_rate=1.0),
            ModelAverage(descend, variables, learning_rate=1.0),
        ]

    def refuse(what: str) -> None:
        raise coordinator.StrategyClosedError(what)

    services = dataclasses.replace(strategy.extended.services, refuse_closed=refuse)
    monkeypatch.setattr(strategy.extended, "services", services)
    for rule in rules:
        calls = {"statistics": (), "switch_to": (rules[0],)}
        calls |= {name: () for name in ("flush", "abort", "resume") if hasattr(rule, name)}
        for name, arguments in calls.items():
            with pytest.raises(coordinator.StrategyClosedError, match=rf"rule\.{name}\(\) .* before strategy.close"):
                getattr(rule, name)(*arguments)


CLOSED = """
import pytest
import tensorflow as tf
import coordinator
from coordinator.testing import LocalCluster
from coordinator.updates import Asynchronous, ModelAverage, Synchronous

def descend(variable, gradient, rate):
    variable.assign_sub(rate * gradient)

with LocalCluster(workers=1, ps=1) as cluster:
    with coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            variables = [tf.Variable(0.0)]
            rules = [
                Asynchronous(descend, variables, learning_rate=1.0),
                Synchronous(descend, variables, grads_to_wait=2, learning_rate=1.0),
                ModelAverage(descend, variables, learning_rate=1.0),
            ]
            other = Asynchronous(descend, variables, learning_rate=1.0)
        # It works before the strategy is closed.
        rules[0].statistics()
    for rule in rules:
        calls = {"statistics": (), "switch_to": (other,)}
        calls |= {name: () for name in ("flush", "abort", "resume") if hasattr(rule, name)}
        for name, arguments in calls.items():
            message = rf"rule\\.{name}\\(\\) .* the strategy is closed"
            with pytest.raises(coordinator.StrategyClosedError, match=message):
                getattr(rule, name)(*arguments)
    print("all refused")
"""


@pytest.mark.cluster
@pytest.mark.long
def test_methods_of_a_rule_raise_when_the_strategy_is_closed(run_program: ProgramRunner) -> None:
    assert "all refused" in run_program(CLOSED, timeout=240).stdout
