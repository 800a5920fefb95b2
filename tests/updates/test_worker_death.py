"""Tests that workers that die at any point of a step leave a consistent state and no waiting worker."""

import pytest

from tests.program_runner import ProgramRunner

# A gradient of -1 with a learning rate of 1, so that both variables, each on another server, count the updates.
PROGRAM = """
import random, threading
import tensorflow as tf
import coordinator
from coordinator.testing import LocalCluster
from coordinator.updates import Asynchronous, BoundedDelay, Delayed, StaleSynchronous, Synchronous
from coordinator.updates.rule_state import pause

STEPS, DEATHS, SOME_TIME, CHANCE = 60, 2, threading.Event(), random.Random(1)

def sgd(variable, gradient, learning_rate):
    variable.assign_sub(learning_rate * gradient)

def leaves_steps_at_least_once(statistics, values):
    # What a torn push may do: an update that reached one server alone. Its step is run once more.
    assert statistics.updates >= STEPS - DEATHS and min(values) >= STEPS, (statistics, values)
    assert max(values) - min(values) <= DEATHS, values

def leaves_whole_queue(statistics, values):
    # What the last steps have pushed waits for another pull.
    queued = statistics.pushes - statistics.rejected - statistics.updates
    assert queued >= 0 and values[0] == values[1] == statistics.updates, (statistics, values)
    assert statistics.pushes - statistics.rejected >= STEPS, statistics

def leaves_whole_updates(statistics, values):
    assert values[0] == values[1] == statistics.updates, (statistics, values)
    assert statistics.pushes - statistics.rejected >= STEPS, statistics

RULES = [
    (Asynchronous, {}, leaves_steps_at_least_once, None),
    (StaleSynchronous, {"get_model_frequency": 3, "max_lead": 4}, leaves_steps_at_least_once, None),
    (Delayed, {"delay": 0.1}, leaves_whole_queue, None),
    (Synchronous, {"grads_to_wait": 2}, leaves_whole_updates, None),
    (BoundedDelay, {"max_delay": 2}, leaves_whole_updates, 2),
    (BoundedDelay, {"max_delay": 1, "grads_to_wait": 2}, leaves_whole_updates, 1),
]

def run(kind, settings, check, most_staleness):
    with strategy.scope():
        variables = [tf.Variable(0.0), tf.Variable(0.0)]
        rule = kind(sgd, variables, learning_rate=1.0, **settings)

    def body(is_slow):
        with tf.control_dependencies([pause(tf.where(is_slow, 0.1, 0.01))]):
            return tf.constant(0.0), [tf.constant(-1.0), tf.constant(-1.0)]

    @tf.function
    def step():
        is_slow = strategy.extended.services.worker_index() == 0
        return rule.run(lambda: body(is_slow))

    futures = [strategy.schedule(step) for _ in range(STEPS)]
    for _ in range(DEATHS):
        worker = CHANCE.randrange(3)
        SOME_TIME.wait(CHANCE.uniform(0.2, 1.0))
        cluster.kill("worker", worker)
        SOME_TIME.wait(CHANCE.uniform(0.0, 0.5))
        cluster.restart("worker", worker)
    strategy.join(timeout=240)
    assert all(future.done() for future in futures)
    statistics = rule.statistics()
    print(statistics, [float(variable) for variable in variables])
    check(statistics, [float(variable) for variable in variables])
    assert most_staleness is None or statistics.staleness.max <= most_staleness, statistics
    # Training continues: no worker is waited for, and no lock is held.
    futures = [strategy.schedule(step) for _ in range(30)]
    strategy.join(timeout=240)
    assert rule.statistics().pushes >= statistics.pushes + 30

with LocalCluster(workers=3, ps=2) as cluster, coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
    for rule in RULES:
        run(*rule)
"""


@pytest.mark.cluster
@pytest.mark.release
def test_dying_workers_leave_whole_updates_and_no_worker_waiting(run_program: ProgramRunner) -> None:
    run_program(PROGRAM, timeout=900)
