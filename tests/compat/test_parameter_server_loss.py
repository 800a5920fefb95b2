"""A program for TensorFlow's coordinator that starts again in the same process after a parameter server was lost."""

import pytest

from tests.program_runner import ProgramRunner

PROGRAM = """
import tensorflow as tf

from coordinator.compat import ClusterCoordinator, ParameterServerStrategy
from coordinator.testing import LocalCluster


def train(cluster, attempt):
    strategy = ParameterServerStrategy(cluster.resolver)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        count = tf.Variable(0)

    @tf.function
    def step():
        count.assign_add(1)

    for _ in range(10):
        coordinator.schedule(step)
    coordinator.join()
    if not attempt:
        cluster.kill("ps", 0)
        value = coordinator.schedule(step)
        try:
            value.fetch()
        except tf.errors.UnavailableError as error:
            print("fetch:", error)
        coordinator.join()
    return strategy, int(count.numpy())


with LocalCluster(workers=2, ps=1) as cluster:
    for attempt in range(3):
        try:
            strategy, count = train(cluster, attempt)
        except tf.errors.UnavailableError as error:
            print("join:", error)
            cluster.restart("ps", 0)
        else:
            print("count:", count)
"""


@pytest.mark.cluster
@pytest.mark.long
def test_a_lost_parameter_server_is_unavailable_and_a_new_strategy_continues(run_program: ProgramRunner) -> None:
    ended = run_program(PROGRAM, timeout=240)
    for verb in ("fetch", "join"):
        assert f"{verb}: The parameter server /job:ps/task:0" in ended.stdout
    # The second attempt's strategy is still in use when the third one's is created.
    assert ended.stdout.count("count: 10") == 2
    assert "This process already has a ParameterServerStrategy, which is closed now" in ended.stderr
