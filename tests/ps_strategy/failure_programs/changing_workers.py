"""A client whose workers are added, removed and moved while it trains. It ends with code 0 if every case passes."""

import contextlib
import pathlib
import tempfile
import threading
from collections.abc import Collection, Iterator

import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import unhealthy
from tests.ps_strategy.membership.fake_kubernetes import SELECTOR, FakeKubernetes, pod

TIMEOUT = 120.0
TOKEN = "renewed"  # noqa: S105 - of no other server


class Training:
    """A step that uses its worker's iterator, table and per-worker variable, and returns where it ran."""

    def __init__(self, strategy: coordinator.ParameterServerStrategy) -> None:
        self.strategy, self.workers = strategy, strategy.cluster
        with strategy.scope():
            self.count = count = tf.Variable(0)
            self.own = own = tf.Variable(0, per_worker_variable=True)
            table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0, 1, 2], [10, 11, 12]), -1)
        self._iterator = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(3).repeat()))

        @tf.function
        def step(iterator: tf.data.Iterator) -> tuple[tf.Tensor, tf.Tensor]:
            count.assign_add(1)
            own.assign_add(1)
            return coordinator.get_current_worker_index(), table.lookup(tf.cast(next(iterator), tf.int32))

        self._step = step
        self.run_on(strategy.cluster.workers[0].index)

    def schedule(self, **settings: int) -> coordinator.Future:
        return self.strategy.schedule(self._step, args=(self._iterator,), **settings)

    def run_on(self, worker: int) -> int:
        """Runs the step on one worker, and returns the word from its table."""
        index, found = self.schedule(worker=worker).result(TIMEOUT)
        assert int(index) == worker
        return int(found)

    def wait_present(self, indices: Collection[int]) -> None:
        """Waits until the cluster has exactly these workers."""
        wait_until(lambda: [worker.index for worker in self.workers.workers] == sorted(indices), limit=TIMEOUT)

    def states(self) -> list[str]:
        return [worker.state.value for worker in self.workers.workers]

    @contextlib.contextmanager
    def continuing(self) -> Iterator[None]:
        """Trains during the block; no function fails."""
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
        statistics = self.workers.statistics()
        assert statistics.failed == 0
        # At least once each.
        assert self.count.numpy() >= statistics.finished - 20


def by_calls(cluster: LocalCluster) -> str:
    """Changes workers by the methods of the cluster; returns the address of a worker that was removed."""
    with coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        training = Training(strategy)
        address = cluster.start_worker()
        with training.continuing():
            assert training.workers.add_worker(address) == 2
            assert training.run_on(2) == 10, "its iterator starts from the beginning, and its table is a copy"
            wait_until(lambda: training.workers.statistics().workers[2].finished > 20)
            training.workers.remove_worker(2)
            training.wait_present([0, 1])
            training.run_on(0)
        assert len(training.own.read_all()) == 2

        with training.continuing():
            cluster.kill("worker", 1)
            wait_until(lambda: training.states() == ["live", "lost"])
            training.workers.move_worker(1, cluster.start_worker())
            assert training.run_on(1) == 10
            wait_until(lambda: not unhealthy(strategy))

        # One that never returns blocks no other. Worker 1 has number 3 in the local cluster now.
        with training.continuing():
            for index in (0, 3):
                cluster.kill("worker", index)
            wait_until(lambda: training.states() == ["lost", "lost"])
            cluster.restart("worker", 0)
            training.run_on(0)
        assert training.states() == ["live", "lost"]
    cluster.restart("worker", 1)
    return address


def by_pods(cluster: LocalCluster, folder: pathlib.Path, third: str) -> None:
    addresses = [*cluster.spec["worker"], third]
    (folder / "token").write_text(TOKEN)
    with FakeKubernetes() as kubernetes:

        def create(index: int) -> None:
            kubernetes.put(pod(index, addresses[index]))

        for index in (0, 1):
            create(index)
        resolver = coordinator.KubernetesClusterResolver(
            cluster.resolver, selector=SELECTOR, api_server=kubernetes.url, credentials=folder
        )
        with coordinator.ParameterServerStrategy(resolver) as strategy:
            training = Training(strategy)
            with training.continuing():
                create(2)
                training.wait_present(range(3))
                training.run_on(2)
                # One ends without notice; its successor has its place before its server answers.
                cluster.kill("worker", 1)
                kubernetes.remove(1)
                training.wait_present([0, 2])
                cluster.restart("worker", 1, wait=False)
                create(1)
                training.wait_present(range(3))
                training.run_on(1)
                # Changes are noticed after faults of the API server.
                kubernetes.token = TOKEN
                kubernetes.forget()
                kubernetes.delete(2)
                training.wait_present([0, 1])
                training.run_on(0)


def main() -> None:
    with LocalCluster(workers=2, ps=1) as cluster, tempfile.TemporaryDirectory() as folder:
        removed = by_calls(cluster)
        by_pods(cluster, pathlib.Path(folder), removed)


if __name__ == "__main__":
    main()
