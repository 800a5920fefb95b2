"""A client whose parameter server moves to another address: first one that has died, then one that still runs.

The functions take a value from each parameter server to the other, so that these must reach each other as well.
"""

import contextlib
import os
import pathlib
import tempfile

import tensorflow as tf

import coordinator
from coordinator.launch.server_process import LocalServers, free_addresses
from coordinator.testing import LocalCluster
from tests.deadline import LIMIT, wait_until


class Program:
    """Variables on two parameter servers, a checkpoint of them, and functions that use both."""

    def __init__(self, strategy: coordinator.ParameterServerStrategy, folder: pathlib.Path) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.values = [tf.Variable(16.0), tf.Variable(4.0)]
            steps = tf.Variable(0, dtype=tf.int64)
        assert len({value.device for value in self.values}) == 2
        self._checkpoint = tf.train.Checkpoint(values=self.values, steps=steps)
        self._manager = tf.train.CheckpointManager(self._checkpoint, folder, max_to_keep=2)
        strategy.restore_from(self._manager, step=steps)
        self._iterator = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(10).repeat()))
        self._step = tf.function(lambda iterator: steps.assign_add(next(iterator) * 0 + 1))
        self._there = tf.function(lambda: crossing(*self.values))
        self._back = tf.function(lambda: crossing(*reversed(self.values)))
        self._manager.save()

    def move(self, address: str) -> None:
        """Moves the second parameter server while functions run, and checks all that may be lost."""
        recoveries = self._recoveries()
        for _ in range(20):
            self.strategy.schedule(self._step, (self._iterator,))
        self.strategy.cluster.move_parameter_server(1, address)
        wait_until(lambda: self._recoveries() == recoveries + 1)
        self.strategy.join(LIMIT)
        assert [value.numpy() for value in self.values] == [16.0, 4.0]
        assert self.strategy.schedule(self._there).result(LIMIT) == 5.0
        assert abs(self.strategy.schedule(self._back).result(LIMIT) - 5.0**0.5 - 1.0) < 1e-6
        assert self.strategy.cluster.statistics().failed == 0
        self._checkpoint.restore(self._manager.latest_checkpoint)

    def _recoveries(self) -> int:
        return self.strategy.cluster.statistics().parameter_servers[1].recoveries


def crossing(source: tf.Variable, target: tf.Variable) -> tf.Tensor:
    with tf.device(source.device):
        value = tf.sqrt(source.read_value())
    with tf.device(target.device):
        return target.assign(value + 1.0)


def move(cluster: LocalCluster, program: Program, folder: pathlib.Path) -> None:
    first, former = cluster.spec["ps"]
    [address] = free_addresses(1, besides=[*cluster.spec["ps"], *cluster.spec["worker"]])
    with contextlib.closing(LocalServers({**cluster.spec, "ps": [first, address]}, folder, os.environ)) as elsewhere:
        elsewhere["ps", 1].start()
        elsewhere["ps", 1].wait_ready(LIMIT)
        cluster.kill("ps", 1)
        program.move(address)
        cluster.restart("ps", 1)
        program.move(former)
        program.strategy.close()


if __name__ == "__main__":
    with LocalCluster(workers=2, ps=2) as servers, tempfile.TemporaryDirectory() as name:
        path = pathlib.Path(name)
        move(servers, Program(coordinator.ParameterServerStrategy(servers.resolver), path / "saved"), path)
