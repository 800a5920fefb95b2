"""Tests of checkpoints while parameter servers are lost, on clusters of their own."""

import pytest

from tests.program_runner import ProgramRunner

pytestmark = [pytest.mark.cluster, pytest.mark.long]

PROGRAM = """
    import logging
    import os
    import tempfile

    import tensorflow as tf

    import coordinator
    from coordinator.checkpoints import EverySteps, Latest
    from coordinator.testing import LocalCluster
    from tests.deadline import wait_until

    class Log(logging.Handler):
        def __init__(self):
            super().__init__()
            self.lines = []

        def emit(self, record):
            self.lines.append(record.getMessage())

    log = Log()
    logging.getLogger("coordinator").addHandler(log)
    folder = tempfile.mkdtemp(dir=".")
    with LocalCluster(workers=2, ps=2) as cluster, coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            tables = [tf.Variable(lambda: tf.zeros([1_000_000, 32])) for _ in range(4)]
            x, y = (tf.Variable(0, dtype=tf.int64) for _ in range(2))
        rollbacks = []
        checkpoint = tf.train.Checkpoint(tables=tables, x=x, y=y)
        checkpoints = coordinator.Checkpoints(checkpoint, folder, save=[EverySteps(10**9)], keep=[Latest(2)])
        strategy.restore_from(checkpoints, on_rollback=rollbacks.append)

        @tf.function
        def step():
            for table in tables:
                table.scatter_add(tf.IndexedSlices(tf.ones([1, 32]), [7]))
            x.assign_add(1)
            y.assign_add(1)

        def train(steps):
            for _ in range(steps):
                strategy.schedule(step)
            strategy.join(120)

        def state():
            return {int(value) for value in [x.numpy(), y.numpy(), *(table[7, 0].numpy() for table in tables)]}

        def lose(index):
            count = len(rollbacks)
            cluster.restart("ps", index)
            wait_until(lambda: len(rollbacks) > count, 120)
            strategy.join(120)

        train(30)
        first = checkpoints.save(now=True)
        assert checkpoints.wait(120) == first
        train(20)
        second = checkpoints.save(now=True)
        train(5)
        lose(1)
        assert checkpoints.latest == first, (checkpoints.latest, second)
        try:
            checkpoints.wait(120)
            raise AssertionError("no error")
        except (tf.errors.OpError, RuntimeError) as error:
            print(type(error), error)
        assert any("ckpt-2 could not be saved" in line for line in log.lines), log.lines
        assert (checkpoints.statistics().failed, rollbacks[0].checkpoint) == (1, first)
        assert state() == {30}, state()
        assert not [name for name in os.listdir(folder) if name.startswith("ckpt-2")], os.listdir(folder)
        train(10)
        third = checkpoints.save(now=True)
        train(7)
        assert checkpoints.wait(120) == third
        assert [each.step for each in checkpoints.history] == [30, 40]
        train(3)
        lose(0)
        assert rollbacks[1].checkpoint == third
        assert (rollbacks[1].step_before, rollbacks[1].step_after) == (50, 40), rollbacks
        assert state() == {40}, state()
        train(1)
        assert state() == {41}, state()
        # Closing waits until a checkpoint is written.
        path = checkpoints.save(now=True)
        assert checkpoints.latest == third
        strategy.close()
        assert checkpoints.latest == tf.train.latest_checkpoint(folder) == path
        try:
            checkpoints.save(now=True)
            raise AssertionError("no error")
        except RuntimeError as error:
            print(error)
"""


def test_a_server_lost_while_a_checkpoint_is_written(run_program: ProgramRunner) -> None:
    """The write fails and is logged, what was complete is restored, and later checkpoints succeed."""
    run_program(PROGRAM)
