"""Ends strategies in several ways while generators of their datasets wait in this process for ever.

It prints `ended` before the program ends, which closes the last strategy.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator

import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster
from tests.deadline import wait_until

WORKERS = 2


class Generators:
    """A strategy with a dataset of generators in this process, which yield one element, then wait."""

    def __init__(self, cluster: LocalCluster) -> None:
        options = coordinator.Options(close_timeout=0.5, heartbeat_timeout=1.0)
        self.strategy = coordinator.ParameterServerStrategy(cluster.resolver, options=options)
        # Each generator that waits occupies one of TensorFlow's threads, of which there may be only two.
        self.may_end = threading.Event()
        waiting = threading.Semaphore(0)

        def elements() -> Iterator[float]:
            yield 1.0
            waiting.release()
            self.may_end.wait()

        dataset = tf.data.Dataset.from_generator(elements, output_signature=tf.TensorSpec([])).prefetch(2)
        iterator = iter(self.strategy.experimental_distribute_dataset(dataset))
        step = tf.function(lambda iterator: next(iterator))  # noqa: PLW0108 - a builtin has no signature
        for _ in range(2 * WORKERS):
            self.strategy.schedule(step, args=(iterator,))
        for _ in range(WORKERS):
            assert waiting.acquire(timeout=60.0)


def interrupt(cluster: LocalCluster) -> threading.Event:
    """Presses Ctrl-C while the main thread is in `join`, and leaves the strategy's block by that."""
    generators = Generators(cluster)
    try:
        with generators.strategy as strategy:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
            strategy.join()
    except KeyboardInterrupt:
        pass
    return generators.may_end


def lose_and_remove_workers(cluster: LocalCluster) -> None:
    """Restarts a worker, which is lost and reconnected to, or not, and removes the other one."""
    workers = Generators(cluster).strategy.cluster
    cluster.kill("worker", 1)
    wait_until(lambda: workers.workers[1].state.value == "lost")
    cluster.restart("worker", 1)
    workers.remove_worker(0, timeout=1.0)


if __name__ == "__main__":
    # A change of the servers needs one beside those of the generators.
    tf.config.threading.set_inter_op_parallelism_threads(4)
    with LocalCluster(workers=WORKERS, ps=1) as servers:
        interrupt(servers).set()
        lose_and_remove_workers(servers)
        sys.stdout.write("ended\n")
