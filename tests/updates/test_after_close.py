"""What a rule says when it is asked after its strategy was closed."""

import pytest

from tests.program_runner import ProgramRunner

CLOSED = """
import pytest
import tensorflow as tf
import coordinator
from coordinator.testing import LocalCluster
from coordinator.updates import Asynchronous, BoundedDelay, Delayed, ModelAverage, Synchronous

def descend(variable, gradient, rate):
    variable.assign_sub(rate * gradient)

with LocalCluster(workers=1, ps=1) as cluster:
    with coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            variables = [tf.Variable(0.0)]
            rules = [
                Asynchronous(descend, variables, learning_rate=1.0),
                Synchronous(descend, variables, 2, learning_rate=1.0),
                BoundedDelay(descend, variables, 1, learning_rate=1.0),
                Delayed(descend, variables, 0.0, learning_rate=1.0),
                ModelAverage(descend, variables, learning_rate=1.0),
            ]
            others = [Asynchronous(descend, variables, learning_rate=1.0) for _ in rules]
        # After a first one, that every call has been made once says nothing any more.
        rules[0].statistics(), rules[1].flush()
    for rule, other in zip(rules, others):
        calls = {"statistics": (), "switch_to": (other,)}
        calls |= {name: () for name in ("flush", "abort", "resume") if hasattr(rule, name)}
        for name, arguments in calls.items():
            message = rf"rule\\.{name}\\(\\) .* the strategy is closed"
            with pytest.raises(coordinator.StrategyClosedError, match=message):
                getattr(rule, name)(*arguments)
    print("all refused")
"""


@pytest.mark.cluster
def test_a_closed_strategy_is_named_by_what_a_rule_is_asked(run_program: ProgramRunner) -> None:
    assert "all refused" in run_program(CLOSED, timeout=240).stdout
