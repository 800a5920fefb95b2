"""A client whose workers freeze: the others go on, functions run elsewhere, and nothing waits for it for ever.

It ends with code 0 if every case passes.
"""

import faulthandler
import gc
import tempfile

import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import unhealthy

TIMEOUT = 120.0
FUNCTIONS = 60


class Program(coordinator.ParameterServerStrategy):
    """A strategy with a function that counts its runs."""

    def __init__(self, cluster: LocalCluster, heartbeat_timeout: float, steps: int) -> None:
        options = coordinator.Options(
            heartbeat_interval=0.2, heartbeat_timeout=heartbeat_timeout, steps_per_dispatch=steps
        )
        super().__init__(cluster.resolver, options=options)
        with self.scope():
            self.count = count = tf.Variable(0)
        self.step = tf.function(lambda: count.assign_add(1))
        for worker in self.cluster.workers:
            self.schedule(self.step, worker=worker.index).result(TIMEOUT)
        count.assign(0)

    def schedule_many(self) -> list[coordinator.Future]:
        return [self.schedule(self.step) for _ in range(FUNCTIONS)]


def the_other_worker_never_pauses(cluster: LocalCluster) -> None:
    """As long as the silence of the frozen one is not noticed, which takes very long here."""
    # To build a call of several functions, TensorFlow asks every worker.
    with Program(cluster, heartbeat_timeout=1000.0, steps=1) as program:
        cluster.freeze("worker", 0)
        futures = program.schedule_many()
        wait_until(lambda: sum(future.done() for future in futures) >= FUNCTIONS - 1)
        cluster.thaw("worker", 0)
        program.join(TIMEOUT)
        assert program.count.numpy() == FUNCTIONS
        assert program.cluster.statistics().retried == 0


def functions_run_elsewhere(cluster: LocalCluster) -> None:
    """First the frozen one thaws and is used again; then one stays frozen, for which `join` and `close` do not wait."""
    with Program(cluster, heartbeat_timeout=1.5, steps=8) as program:
        for victim in (0, 1):
            retried = program.cluster.statistics().retried
            cluster.freeze("worker", victim)
            futures = program.schedule_many()
            program.join(TIMEOUT)
            assert all(future.exception(timeout=0) is None for future in futures)
            wait_until(lambda lost=victim: unhealthy(program) == (program.cluster.workers[lost].device,))
            retried = program.cluster.statistics().retried - retried
            assert FUNCTIONS <= program.count.numpy() <= FUNCTIONS + retried
            if victim == 0:
                cluster.thaw("worker", 0)
                program.schedule(program.step, worker=0).result(TIMEOUT)
                program.count.assign(0)
    cluster.thaw("worker", 1)


def the_client_goes_on(cluster: LocalCluster) -> None:
    """Its operations return, although TensorFlow calls every worker for them."""
    with Program(cluster, heartbeat_timeout=2.0, steps=1) as program:
        count = program.count
        cluster.freeze("worker", 1)
        # A new operation, one on a server, a new function, a trace, dropping a function, a checkpoint, and functions.
        tf.constant([1, 2, 3], tf.int64) + 4
        count.assign_add(2)
        function = tf.function(lambda x: x * count)
        function(tf.constant(2))
        tf.function(lambda x: x + count).get_concrete_function(tf.constant(2))
        del function
        gc.collect()
        with tempfile.TemporaryDirectory() as folder:
            tf.train.Checkpoint(count=count).save(f"{folder}/checkpoint")
        for number in range(5):
            tf.function(lambda x, number=number: x + number)(tf.constant(1))
        assert unhealthy(program) == (program.cluster.workers[1].device,)
        cluster.thaw("worker", 1)
        wait_until(lambda: not unhealthy(program))
        assert count.numpy() == 2


if __name__ == "__main__":
    # A call that hangs may keep Python's global lock; nothing else could end this program.
    faulthandler.dump_traceback_later(240, exit=True)
    with LocalCluster(workers=2, ps=1) as servers:
        the_other_worker_never_pauses(servers)
        functions_run_elsewhere(servers)
        the_client_goes_on(servers)
