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


def square(number: int) -> int:
    """Runs in a process of a pool."""
    return number * number


def end_in_order() -> None:
    """Leaves the blocks of the parent, and runs the finalizers."""
    sys.exit(0)


def collect() -> None:
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


def main() -> None:
    strategy = connect(sys.argv[1])
    with strategy:
        with strategy.scope():
            count = tf.Variable(0)
        # Deleted by the child that ends in order, as Python does at the end.
        others = [strategy.schedule(tf.function(lambda: tf.range(3)), fetch=False) for _ in range(3)]
        step = tf.function(lambda: count.assign_add(1))
        for round_number, child in enumerate([end_in_order, collect, lambda: use(strategy)]):
            for _ in range(STEPS):
                strategy.schedule(step)
            strategy.join(TIMEOUT)
            assert count.numpy() == STEPS * (round_number + 1)
            process = os.fork()
            if not process:
                child()
            _, status = os.waitpid(process, 0)
            assert os.waitstatus_to_exitcode(status) == 0, child
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(square, range(4)) == [0, 1, 4, 9]
        for _ in range(STEPS):
            strategy.schedule(step)
        strategy.join(TIMEOUT)
        assert count.numpy() == 4 * STEPS
        assert [other.result(TIMEOUT).tolist() for other in others] == [[0, 1, 2]] * 3
        lost = [each for each in strategy.events.since(0)[0] if "lost" in each.kind]
        assert not lost, lost


if __name__ == "__main__":
    main()
