"""Ends a strategy in several ways, or removes a worker, while generators of its datasets wait in this process for ever.

Its argument is the name of one of the functions below `ENDINGS`. It starts a cluster, and prints `ended`.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster
from tests.deadline import wait_until

WORKERS = 2
OPTIONS = coordinator.Options(close_timeout=0.5, heartbeat_timeout=1.0)

waiting = threading.Semaphore(0)
never = threading.Event()


def elements() -> Iterator[float]:
    """Yields one element, then waits for ever."""
    yield 1.0
    waiting.release()
    never.wait()


def schedule_on_all(strategy: coordinator.ParameterServerStrategy) -> None:
    """Makes each worker wait for an element, and returns when they do."""
    with strategy.scope():
        total = tf.Variable(0.0)
    dataset = tf.data.Dataset.from_generator(elements, output_signature=tf.TensorSpec([])).prefetch(2)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))

    @tf.function
    def step(iterator: Iterator[tf.Tensor]) -> None:
        total.assign_add(next(iterator))

    for _ in range(2 * WORKERS):
        strategy.schedule(step, args=(iterator,))
    for _ in range(WORKERS):
        assert waiting.acquire(timeout=60.0)


def close(cluster: LocalCluster) -> None:
    """Calls `close`."""
    strategy = coordinator.ParameterServerStrategy(cluster.resolver, options=OPTIONS)
    schedule_on_all(strategy)
    strategy.close()


def close_despite_patient_heartbeats(cluster: LocalCluster) -> None:
    """Calls `close` where a server may be silent for very long before it counts as lost."""
    options = coordinator.Options(close_timeout=0.5, heartbeat_timeout=1000.0)
    strategy = coordinator.ParameterServerStrategy(cluster.resolver, options=options)
    schedule_on_all(strategy)
    strategy.close()


def leave_block(cluster: LocalCluster) -> None:
    """Leaves the strategy's block by an error."""
    try:
        with coordinator.ParameterServerStrategy(cluster.resolver, options=OPTIONS) as strategy:
            schedule_on_all(strategy)
            raise ValueError("of the user")
    except ValueError:
        pass


def interrupt(cluster: LocalCluster) -> None:
    """Presses Ctrl-C while the main thread is in `join`."""
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    try:
        with coordinator.ParameterServerStrategy(cluster.resolver, options=OPTIONS) as strategy:
            schedule_on_all(strategy)
            timer.start()
            strategy.join()
    except KeyboardInterrupt:
        pass


def end_program(cluster: LocalCluster) -> None:
    """Does nothing; the end of the program closes the strategy."""
    strategy = coordinator.ParameterServerStrategy(cluster.resolver, options=OPTIONS)
    schedule_on_all(strategy)


def remove_worker(cluster: LocalCluster) -> None:
    """Removes a worker, then closes."""
    strategy = coordinator.ParameterServerStrategy(cluster.resolver, options=OPTIONS)
    schedule_on_all(strategy)
    strategy.cluster.remove_worker(0, timeout=1.0)
    strategy.close()


def restart_worker(cluster: LocalCluster) -> None:
    """Kills a worker and starts it again: it is lost and reconnected to, or not, while generators wait; then closes."""
    strategy = coordinator.ParameterServerStrategy(cluster.resolver, options=OPTIONS)
    schedule_on_all(strategy)
    cluster.kill("worker", 1)
    wait_until(lambda: strategy.cluster.statistics().workers[1].state == "lost")
    cluster.restart("worker", 1)
    strategy.close()


ENDINGS: dict[str, Callable[[LocalCluster], None]] = {
    function.__name__: function
    for function in (
        close,
        close_despite_patient_heartbeats,
        leave_block,
        interrupt,
        end_program,
        remove_worker,
        restart_worker,
    )
}

if __name__ == "__main__":
    with LocalCluster(workers=WORKERS, ps=1) as servers:
        ENDINGS[sys.argv[1]](servers)
        sys.stdout.write("ended\n")
