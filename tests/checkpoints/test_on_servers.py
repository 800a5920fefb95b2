"""Tests of snapshots on servers: of one moment, of all that a checkpoint can hold, also while a server is lost."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from coordinator import Checkpoints
from coordinator.checkpoints import EverySteps
from coordinator.ps_strategy.recovery.variable_recovery import SaveServices
from tests.embeddings.tables import make_step, make_table
from tests.program_runner import ProgramRunner
from tests.ps_strategy.sharded.partitioners import sharded

DEADLINE = 120


class Counted(tf.train.experimental.PythonState):
    """How many steps have finished, on the client."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def increment(self, _) -> None:
        self.count += 1

    def serialize(self) -> str:
        return str(self.count)

    def deserialize(self, text) -> None:
        self.count = int(text)


def begun(strategy, checkpoint, directory, steps, **settings) -> Checkpoints:
    """Returns checkpoints of the shared strategy, whose `restore_from` is not called: it could not be undone."""
    checkpoints = Checkpoints(checkpoint, directory, **settings)

    def save(take, _) -> str:
        with strategy.quiet():
            return take()

    memory = strategy.extended.services.options.checkpoint_memory
    checkpoints.begin(SaveServices(save, steps, True, memory, strategy.events))
    return checkpoints


class Everything:
    """All that a checkpoint can hold: variables on both servers, whole, divided and in blocks, a table, and a count."""

    def __init__(self, strategy) -> None:
        with strategy.scope():
            self.first, self.second = (tf.Variable(0, dtype=tf.int64) for _ in range(2))
            self.large = tf.Variable(lambda: tf.zeros([1000, 40]))
        self.parts = sharded(strategy, np.zeros([7, 2], np.float32))
        self.table = make_table(strategy)
        self._look_up, self._strategy = make_step(self.table), strategy
        self.counted = Counted()
        self.checkpoint = tf.train.Checkpoint(**{name: each for name, each in vars(self).items() if name[0] != "_"})
        self.train_rows(0)
        self.rows = self.table.lookup(np.arange(5)).numpy()

        @tf.function
        def step():
            self.first.assign_add(1)
            self.large.scatter_add(tf.IndexedSlices(tf.ones([2, 40]), [999, 3]))
            self.parts.scatter_add(tf.IndexedSlices(tf.ones([2, 2]), [6, 0]))
            self.second.assign_add(1)

        self.step = step

    def train_rows(self, first) -> None:
        """Changes five rows of the table, or makes them."""
        arguments = np.arange(first, first + 5), np.ones([5, 4], np.float32)
        self._strategy.schedule(self._look_up, args=arguments).result(DEADLINE)

    def train(self, steps, checkpoints) -> None:
        """Runs steps and saves as the policies say."""
        queued = collections.deque()
        for _ in range(steps):
            queued.append(self._strategy.schedule(self.step))
            queued[-1].add_done_callback(self.counted.increment)
            if len(queued) > 20:
                queued.popleft().result(DEADLINE)
            checkpoints.save()
        self._strategy.join(DEADLINE)

    def assert_is_of_step(self, step) -> None:
        """Fails unless all values are of this step."""
        assert (int(self.first.numpy()), int(self.second.numpy()), self.counted.count) == (step, step, step)
        assert self.large.numpy()[[0, 3, 999], 0].tolist() == [0, step, step]
        assert self.parts.numpy()[:, 1].tolist() == [step, 0, 0, 0, 0, 0, step]
        np.testing.assert_array_equal(self.table.lookup(np.arange(5)).numpy(), self.rows)
        assert int(self.table.size()) == 5


@pytest.mark.long
def test_a_checkpoint_is_a_snapshot_of_everything(strategy, tmp_path):
    everything = Everything(strategy)
    save = [EverySteps(50)]
    checkpoints = begun(strategy, everything.checkpoint, tmp_path, lambda: everything.counted.count, save=save)
    everything.train(120, checkpoints)
    checkpoints.save(now=True)
    checkpoints.wait(DEADLINE)
    assert len(checkpoints.history) >= 2
    assert checkpoints.history[-1].step == 120
    for each in checkpoints.history:
        everything.train_rows(2)
        everything.checkpoint.restore(each.path).assert_consumed()
        everything.assert_is_of_step(each.step)
    checkpoints.end()


LOSSES = """
    import os
    import tempfile

    import pytest
    import tensorflow as tf

    import coordinator
    from coordinator.checkpoints import EverySteps, Latest
    from coordinator.testing import LocalCluster
    from tests.deadline import wait_until

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
        with pytest.raises((tf.errors.OpError, RuntimeError)):
            checkpoints.wait(120)
        assert (checkpoints.statistics().failed, rollbacks[0].checkpoint) == (1, first)
        assert state() == {30}, state()
        assert not [name for name in os.listdir(folder) if name.startswith("ckpt-2")], os.listdir(folder)
        train(10)
        third = checkpoints.save(now=True)
        train(7)
        assert checkpoints.wait(120) == third
        assert [each.step for each in checkpoints.history] == [30, 40]
        # Closing waits until a checkpoint is written.
        path = checkpoints.save(now=True)
        assert checkpoints.latest == third
        strategy.close()
        assert checkpoints.latest == tf.train.latest_checkpoint(folder) == path
        with pytest.raises(RuntimeError):
            checkpoints.save(now=True)
"""


@pytest.mark.cluster
@pytest.mark.long
def test_a_server_lost_while_a_checkpoint_is_written(run_program: ProgramRunner) -> None:
    """The write fails, what was complete is restored, and later checkpoints succeed."""
    run_program(LOSSES)
