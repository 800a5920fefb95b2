"""Tests of the state of a rule in a checkpoint, and after a parameter server was lost."""

import pytest
import tensorflow as tf

from tests.program_runner import ProgramRunner
from tests.updates.descent import new_rule, pushing_step


def test_a_checkpoint_has_version_clocks_and_counts_with_which_a_rule_continues(strategy, variables, tmp_path):
    rule, again = (new_rule(strategy, "asynchronous", variables) for _ in range(2))

    def train(rule, steps):
        step = pushing_step(rule, [tf.ones_like(variable) for variable in variables])
        for _ in range(steps):
            strategy.schedule(step)
        strategy.join()

    checkpoint = tf.train.Checkpoint(rule=rule)
    train(rule, 7)
    saved, path = rule.statistics(), checkpoint.save(str(tmp_path / "model"))
    assert (saved.updates, saved.pushes, saved.pulls, sum(saved.clocks.values())) == (7, 7, 7, 7)
    # No second model and no steps in flight.
    keys = {key.split("/.ATTRIBUTES")[0] for key, _ in tf.train.list_variables(path)}
    names = ("version", "counts", "clocks", "seconds")
    assert keys == {"_CHECKPOINTABLE_OBJECT_GRAPH", "save_counter", *(f"rule/state/{name}" for name in names)}
    train(rule, 5)
    assert rule.statistics().updates == 12
    checkpoint.restore(path).assert_consumed()
    assert rule.statistics() == saved
    tf.train.Checkpoint(rule=again).restore(path).assert_consumed()
    train(again, 2)
    assert int(again.version) == 9


LOSS = """
import tempfile
import tensorflow as tf
import coordinator
from coordinator.testing import LocalCluster
from coordinator.updates import Asynchronous, Synchronous

def subtract(variable, gradient, rate):
    variable.assign_sub(rate * gradient)

def run(kind, settings):
    with strategy.scope():
        variables = [tf.Variable(0.0), tf.Variable(0.0)]
        rule = kind(subtract, variables, learning_rate=1.0, **settings)
    checkpoint = tf.train.Checkpoint(rule=rule, first=variables[0], second=variables[1])
    manager = tf.train.CheckpointManager(checkpoint, tempfile.mkdtemp(), max_to_keep=2)
    strategy.restore_from(manager)

    @tf.function
    def step():
        return rule.run(lambda: (tf.constant(0.0), [tf.constant(-1.0), tf.constant(-1.0)]))

    def train(steps):
        for _ in range(steps):
            strategy.schedule(step)
        strategy.join()

    train(10)
    manager.save()
    train(6)
    for index in (0, 1):
        cluster.restart("ps", index)
        train(10)
        statistics = rule.statistics()
        first, second = (float(variable) for variable in variables)
        # Back to the checkpoint, then ten more; a step in flight may have run once more.
        assert 20 <= statistics.updates <= 40, statistics
        assert first == second == statistics.updates, (first, second, statistics)
        manager.save()

for kind, settings in ((Asynchronous, {}), (Synchronous, {"grads_to_wait": 1})):
    with LocalCluster(workers=2, ps=2) as cluster, coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        run(kind, settings)
"""


@pytest.mark.cluster
@pytest.mark.release
def test_a_lost_parameter_server_leaves_rule_and_model_of_one_version(run_program: ProgramRunner) -> None:
    run_program(LOSS, timeout=300)
