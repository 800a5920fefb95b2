"""Kills and restarts a worker while functions on the client wait, in a process with one thread for graphs.

Prints `ended`.
"""

import os
import signal
import threading

import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster
from tests.deadline import wait_until

# The loop fills the queue, and waits for room in it.
OPTIONS = coordinator.Options(max_queued_closures=20, steps_per_dispatch=1)


def run(strategy: coordinator.ParameterServerStrategy, cluster: LocalCluster) -> None:
    """Lets three functions wait, one in each way, while a worker is away; then interrupts one."""
    with strategy.scope():
        is_open, count = tf.Variable(False), tf.Variable(0)

    @tf.function
    def step() -> tf.Tensor:
        while not is_open:
            pass
        return tf.identity(count.assign_add(1))

    @tf.function
    def fill() -> None:
        for _ in tf.range(100):
            strategy.schedule(step)

    @tf.function
    def wait() -> tf.Tensor:
        return strategy.local_results(strategy.schedule(step, worker=0))

    @tf.function
    def join() -> None:
        strategy.join()

    calls = [threading.Thread(target=function) for function in (wait, join, fill)]
    for call in calls:
        call.start()
    wait_until(lambda: strategy.cluster.statistics().waiting >= 20)
    cluster.kill("worker", 0)
    wait_until(lambda: not all(worker.healthy() for worker in strategy.cluster.workers))
    cluster.restart("worker", 0)
    wait_until(lambda: all(worker.healthy() for worker in strategy.cluster.workers))
    try:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        join()
    except KeyboardInterrupt:
        is_open.assign(True)
    for call in calls:
        call.join()
    strategy.join()
    assert count.numpy() >= 101


if __name__ == "__main__":
    tf.config.threading.set_inter_op_parallelism_threads(1)
    with (
        LocalCluster(workers=2, ps=1) as servers,
        coordinator.ParameterServerStrategy(servers.resolver, options=OPTIONS) as training,
    ):
        run(training, servers)
    print("ended")  # noqa: T201
