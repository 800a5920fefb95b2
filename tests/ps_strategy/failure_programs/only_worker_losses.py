"""A client whose only worker dies, in one way after another: work waits, and resumes when the worker is back.

It ends with code 0 if every case passes. Its one argument is the number of functions of the longest case.
"""

import sys

import pytest
import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import unhealthy
from tests.ps_strategy.gate import Gate

TIMEOUT = 120.0


class OnlyWorker:
    """A cluster of one worker, and a function that counts its runs."""

    def __init__(self, cluster: LocalCluster, strategy: coordinator.ParameterServerStrategy) -> None:
        self.cluster = cluster
        self.strategy = strategy
        with strategy.scope():
            self._count = count = tf.Variable(0)
        self.step = tf.function(lambda: count.assign_add(1))

    @property
    def losses(self) -> int:
        [worker] = self.strategy.cluster.statistics().workers
        return worker.losses

    def runs(self) -> int:
        """Returns how often the function ran since the last call of this method."""
        runs = int(self._count.numpy())
        self._count.assign(0)
        return runs

    def kill_noticed(self) -> None:
        """Kills the worker, and returns when the client has detected it."""
        losses = self.losses
        self.cluster.kill("worker", 0)
        wait_until(lambda: self.losses > losses)


def between_two_calls(only: OnlyWorker) -> None:
    only.cluster.restart("worker", 0)
    for _ in range(4):
        only.strategy.schedule(only.step)
    only.strategy.join(TIMEOUT)
    assert only.runs() == 4


def while_a_function_runs(only: OnlyWorker) -> None:
    gate = Gate(only.strategy)
    [held] = gate.occupy()
    waiting = [only.strategy.schedule(only.step) for _ in range(3)]
    only.kill_noticed()
    gate.open()
    with pytest.raises(TimeoutError, match="4 closures wait, running: nothing"):
        only.strategy.join(timeout=0.2)
    assert unhealthy(only.strategy) == ("/job:worker/replica:0/task:0",)
    assert not any(future.done() for future in (held, *waiting))
    only.cluster.restart("worker", 0)
    only.strategy.join(TIMEOUT)
    assert held.result(timeout=0) >= 0
    assert only.runs() == 3
    assert unhealthy(only.strategy) == ()


def twice_in_a_row_while_iterators_are_made(only: OnlyWorker) -> None:
    @tf.function
    def step(iterator: tf.data.Iterator) -> tf.Tensor:
        only.step()
        return next(iterator)

    futures = []
    for _ in range(2):
        only.cluster.kill("worker", 0)
        dataset = only.strategy.experimental_distribute_dataset(tf.data.Dataset.range(5, 8).repeat())
        futures += [only.strategy.schedule(step, args=(iter(dataset),)) for _ in range(3)]
        only.cluster.restart("worker", 0)
    only.strategy.join(TIMEOUT)
    assert [int(future.result(timeout=0)) for future in futures] == [5] * 6
    assert 6 <= only.runs() <= 7


def with_thousands_of_functions_waiting(only: OnlyWorker, functions: int) -> None:
    retried = only.strategy.cluster.statistics().retried
    futures = [only.strategy.schedule(only.step) for _ in range(functions)]
    futures[functions // 10].result(TIMEOUT)
    only.kill_noticed()
    assert not futures[-1].done()
    only.cluster.restart("worker", 0)
    only.strategy.join(TIMEOUT)
    assert all(future.exception(timeout=0) is None for future in futures)
    # Functions that ran, several in one call, when their worker died may have counted, and count again.
    retried = only.strategy.cluster.statistics().retried - retried
    assert retried >= 1
    assert functions <= only.runs() <= functions + retried


def main(functions: int) -> None:
    with LocalCluster(workers=1, ps=1) as cluster, coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        only = OnlyWorker(cluster, strategy)
        between_two_calls(only)
        while_a_function_runs(only)
        twice_in_a_row_while_iterators_are_made(only)
        with_thousands_of_functions_waiting(only, functions)


if __name__ == "__main__":
    main(int(sys.argv[1]))
