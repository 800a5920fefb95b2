"""Tests of snapshots on the shared cluster: of one moment, of all that a checkpoint can hold, restored in blocks."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from coordinator import Checkpoints
from coordinator.checkpoints import EverySteps
from coordinator.ps_strategy.recovery.variable_recovery import SaveServices
from tests.embeddings.tables import make_step, make_table
from tests.ps_strategy.sharded.partitioners import sharded

DEADLINE = 120


class Counted(tf.train.experimental.PythonState):
    """How many steps have finished, on the client."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def increment(self, _) -> None:
        """Counts a step."""
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
        self.train_rows(5)
        self.rows = self.table.lookup(np.arange(5)).numpy()
        self.step = self._new_step()

    def train_rows(self, count) -> None:
        """Changes rows of the table, and makes new ones."""
        arguments = np.arange(count), np.ones([count, 4], np.float32)
        self._strategy.schedule(self._look_up, args=arguments).result(DEADLINE)

    def _new_step(self):
        @tf.function
        def step():
            self.first.assign_add(1)
            self.large.scatter_add(tf.IndexedSlices(tf.ones([2, 40]), [999, 3]))
            self.parts.scatter_add(tf.IndexedSlices(tf.ones([2, 2]), [6, 0]))
            self.second.assign_add(1)

        return step

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


@pytest.mark.parametrize("background", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_checkpoint_is_a_snapshot_of_everything(strategy, tmp_path, background):
    everything = Everything(strategy)
    settings = {"save": [EverySteps(50)], "background": background}
    checkpoints = begun(strategy, everything.checkpoint, tmp_path, lambda: everything.counted.count, **settings)
    everything.train(120, checkpoints)
    checkpoints.save(now=True)
    checkpoints.wait(DEADLINE)
    assert len(checkpoints.history) >= 2
    assert checkpoints.history[-1].step == 120
    for each in checkpoints.history:
        everything.train_rows(7)
        everything.checkpoint.restore(each.path).assert_consumed()
        everything.assert_is_of_step(each.step)
    checkpoints.end()
