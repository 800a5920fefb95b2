"""A client that forks processes which end in several ways, and trains on. The servers are started by the test."""

import gc
import multiprocessing
import os
import sys

import pytest
import tensorflow as tf

import coordinator
from tests.ps_strategy.failure_programs.trainer import connect

TIMEOUT = 120.0
STEPS = 20


def end_in_order(strategy: coordinator.ParameterServerStrategy) -> None:
    """Leaves the blocks of the parent, and runs the finalizers."""
    sys.exit(0)


def collect(strategy: coordinator.ParameterServerStrategy) -> None:
    """Deletes what is not referenced, and ends as a process of a pool does."""
    gc.collect()
    os._exit(0)


def use(strategy: coordinator.ParameterServerStrategy) -> None:
    """Tries to use the strategy of the parent, and closes it."""
    for refused in (strategy.join, strategy.done, strategy.cancel_all, strategy.quiet):
        with pytest.raises(RuntimeError, match="from which this process"):
            refused()
    strategy.close()
    os._exit(0)


def main(strategy: coordinator.ParameterServerStrategy) -> None:
    with strategy.scope():
        count = tf.Variable(0)
    # Deleted by the child that ends in order, as Python does at the end.
    others = [strategy.schedule(tf.function(lambda: tf.range(3)), fetch=False) for _ in range(3)]
    step = tf.function(lambda: count.assign_add(1))
    for number, child in enumerate([end_in_order, collect, use, None]):
        for _ in range(STEPS):
            strategy.schedule(step)
        strategy.join(TIMEOUT)
        assert count.numpy() == STEPS * (number + 1)
        if child is None:
            break
        process = os.fork()
        if not process:
            child(strategy)
        _, status = os.waitpid(process, 0)
        assert os.waitstatus_to_exitcode(status) == 0, child
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, range(-4, 0)) == [4, 3, 2, 1]
    assert strategy.schedule(step).result(TIMEOUT) == 4 * STEPS + 1
    assert [other.result(TIMEOUT).tolist() for other in others] == [[0, 1, 2]] * 3
    assert not [each for each in strategy.events.since(0)[0] if "lost" in each.kind]


if __name__ == "__main__":
    with connect(sys.argv[1]) as training:
        main(training)
