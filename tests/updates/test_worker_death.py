"""Workers that die, at whatever point of a step, leave a rule's state whole and nobody waiting."""

import pytest

from tests.program_runner import ProgramRunner

# A gradient of -1 with a learning rate of 1, so that both variables, each on a server of its own, count the updates.
PROGRAM = """
import random, threading
import tensorflow as tf
import coordinator
from coordinator import updates
from coordinator.testing import LocalCluster
from coordinator.updates.gate import pause

STEPS, DEATHS, WAIT = 120, 3, threading.Event()

def sgd(variable, gradient, learning_rate):
    variable.assign_sub(learning_rate * gradient)

with LocalCluster(workers=3, ps=2) as cluster, coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
    with strategy.scope():
        variables = [tf.Variable(0.0), tf.Variable(0.0)]
        rule = updates.{rule}

    def body(slow):
        with tf.control_dependencies([pause(tf.where(slow, 0.05, 0.005))]):
            return tf.constant(0.0), [tf.constant(-1.0), tf.constant(-1.0)]

    @tf.function
    def step():
        slow = strategy.worker_index() == 0
        return rule.run(lambda: body(slow))

    chance = random.Random(1)
    futures = [strategy.schedule(step) for _ in range(STEPS)]
    for _ in range(DEATHS):
        worker = chance.randrange(3)
        WAIT.wait(chance.uniform(0.2, 1.0))
        cluster.kill("worker", worker)
        WAIT.wait(chance.uniform(0.0, 0.5))
        cluster.restart("worker", worker)
    strategy.join(timeout=240)
    assert all(future.done() for future in futures)
    statistics = rule.statistics()
    values = [float(variable) for variable in variables]
    print(statistics, values)
    {check}
    # Everything goes on as before: nobody is waited for, and no lock is held.
    futures = [strategy.schedule(step) for _ in range(30)]
    strategy.join(timeout=240)
    assert rule.statistics().pushes >= statistics.pushes + 30
"""

# What a torn push may do: an update that reached one server alone. Its step is run once more.
AT_LEAST_ONCE = """
    assert statistics.updates >= STEPS - DEATHS and min(values) >= STEPS, (statistics, values)
    assert max(values) - min(values) <= DEATHS, values
"""
WHOLE_UPDATES = """
    assert values[0] == values[1] == statistics.updates, (statistics, values)
    assert statistics.pushes - statistics.rejected >= STEPS, statistics
"""


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.parametrize(
    ("rule", "check"),
    [
        ("Asynchronous(sgd, variables, learning_rate=1.0)", AT_LEAST_ONCE),
        ("StaleSynchronous(sgd, variables, 3, max_lead=4, learning_rate=1.0)", AT_LEAST_ONCE),
        ("Synchronous(sgd, variables, 2, learning_rate=1.0)", WHOLE_UPDATES),
        (
            "BoundedDelay(sgd, variables, 2, learning_rate=1.0)",
            WHOLE_UPDATES + "    assert statistics.staleness.max <= 2, statistics\n",
        ),
        (
            "BoundedDelay(sgd, variables, 1, grads_to_wait=2, learning_rate=1.0)",
            WHOLE_UPDATES + "    assert statistics.staleness.max <= 1, statistics\n",
        ),
    ],
)
def test_workers_that_die_leave_whole_updates_and_nobody_waiting(
    run_program: ProgramRunner, rule: str, check: str
) -> None:
    run_program(PROGRAM.format(rule=rule, check=check.strip()), timeout=600)
