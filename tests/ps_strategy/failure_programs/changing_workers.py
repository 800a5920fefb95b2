"""A client whose workers are added, removed and moved while it trains. It ends with code 0 if every case passes."""

import contextlib
import json
import pathlib
import tempfile
import threading
from collections.abc import Iterator

import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import unhealthy

TIMEOUT = 120.0


class Training:
    """A step that uses its worker's iterator, table and per-worker variable, and returns where it ran."""

    def __init__(self, strategy: coordinator.ParameterServerStrategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.count = count = tf.Variable(0)
            own = tf.Variable(0, per_worker_variable=True)
            table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0, 1, 2], [10, 11, 12]), -1)
        self._iterator = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(3).repeat()))
        self.own = own

        @tf.function
        def step(iterator: tf.data.Iterator) -> tuple[tf.Tensor, tf.Tensor]:
            count.assign_add(1)
            own.assign_add(1)
            return coordinator.get_current_worker_index(), table.lookup(tf.cast(next(iterator), tf.int32))

        self._step = step

    def schedule(self, **settings: int) -> coordinator.Future:
        return self.strategy.schedule(self._step, args=(self._iterator,), **settings)

    def run_on(self, worker: int) -> int:
        """Runs the step on one worker, and returns the word from its table."""
        index, found = self.schedule(worker=worker).result(TIMEOUT)
        assert int(index) == worker
        return int(found)

    @contextlib.contextmanager
    def training_continues(self) -> Iterator[None]:
        """Trains during the block."""
        stop = threading.Event()

        def train() -> None:
            while not stop.is_set():
                futures = [self.schedule() for _ in range(20)]
                futures[-1].exception(TIMEOUT)

        thread = threading.Thread(target=train)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.strategy.join(TIMEOUT)


def worker_joins(cluster: LocalCluster, training: Training) -> None:
    address = cluster.start_worker()
    with training.training_continues():
        index = training.strategy.cluster.add_worker(address)
        assert index == 2
        assert training.run_on(2) == 10, "its iterator starts from the beginning, and its table is a copy"
        wait_until(lambda: training.strategy.cluster.statistics().workers[2].finished > 20)
    assert len(training.own.read_all()) == 3


def worker_leaves(cluster: LocalCluster, training: Training) -> None:
    with training.training_continues():
        training.strategy.cluster.remove_worker(2)
        assert [worker.index for worker in training.strategy.cluster.workers] == [0, 1]
        wait_until(lambda: training.schedule().result(TIMEOUT) is not None)
    assert training.strategy.cluster.statistics().failed == 0
    assert len(training.own.read_all()) == 2


def worker_dies_and_another_takes_its_place(cluster: LocalCluster, training: Training) -> None:
    with training.training_continues():
        cluster.kill("worker", 1)
        wait_until(lambda: training.strategy.cluster.workers[1].state.value == "lost")
        training.strategy.cluster.move_worker(1, cluster.start_worker())
        assert training.run_on(1) == 10
        wait_until(lambda: not unhealthy(training.strategy))
    assert training.strategy.cluster.statistics().failed == 0


def worker_that_never_returns_blocks_no_other(cluster: LocalCluster, training: Training) -> None:
    # Worker 1 is at the address of the second one that was started late, which has number 3 in the local cluster.
    with training.training_continues():
        for index in (0, 3):
            cluster.kill("worker", index)
        wait_until(lambda: all(worker.state.value == "lost" for worker in training.strategy.cluster.workers))
        cluster.restart("worker", 0)
        training.run_on(0)
    assert [worker.state.value for worker in training.strategy.cluster.workers] == ["live", "lost"]
    cluster.restart("worker", 3)
    training.run_on(1)


def workers_follow_a_file(cluster: LocalCluster) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "cluster.json"
        first, second = cluster.spec["worker"]

        def write_workers(*workers: str) -> None:
            fresh = file.with_suffix(".new")
            fresh.write_text(json.dumps({"worker": workers, "ps": cluster.spec["ps"]}))
            fresh.replace(file)

        write_workers(first)
        resolver = coordinator.PolledClusterResolver(file, interval=0.1)
        with coordinator.ParameterServerStrategy(resolver) as strategy:
            training = Training(strategy)
            with training.training_continues():
                write_workers(first, second)
                wait_until(lambda: len(strategy.cluster.workers) == 2)
                training.run_on(1)
                file.write_text("not a cluster")
                training.run_on(1)
                write_workers(second)
                wait_until(lambda: [worker.index for worker in strategy.cluster.workers] == [1])
                training.run_on(1)


def main() -> None:
    with LocalCluster(workers=2, ps=1) as cluster:
        with coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
            training = Training(strategy)
            training.run_on(0)
            for case in (
                worker_joins,
                worker_leaves,
                worker_dies_and_another_takes_its_place,
                worker_that_never_returns_blocks_no_other,
            ):
                case(cluster, training)
            # At least once each.
            assert training.count.numpy() >= strategy.cluster.statistics().finished - 20
        cluster.restart("worker", 1)
        workers_follow_a_file(cluster)


if __name__ == "__main__":
    main()
