"""A client whose worker pods are scaled while it trains: local servers, and a local server in place of Kubernetes.

It ends with code 0 if every case passes.
"""

import contextlib
import pathlib
import tempfile
import time
from collections.abc import Collection

import coordinator
from coordinator.testing import LocalCluster
from tests.deadline import wait_until
from tests.ps_strategy.failure_programs.changing_workers import Training
from tests.ps_strategy.membership.fake_kubernetes import SELECTOR, FakeKubernetes, pod

TOKEN = "renewed"  # noqa: S105 - of no other server


class WorkerPods:
    """The StatefulSet of workers: pods of an API server, each with a server of a local cluster."""

    def __init__(self, cluster: LocalCluster, kubernetes: FakeKubernetes) -> None:
        self._cluster = cluster
        self._kubernetes = kubernetes
        self._addresses = dict(enumerate(cluster.spec["worker"]))
        for index in self._addresses:
            self.create(index)

    def create(self, index: int) -> None:
        """Creates a pod, whose server answers only later."""
        if index not in self._addresses:
            self._addresses[index] = self._cluster.start_worker()
        elif not self._cluster.is_alive("worker", index):
            self._cluster.restart("worker", index, wait=False)
        self._kubernetes.put(pod(index, self._addresses[index]))

    def delete(self, index: int, training: Training) -> None:
        """Deletes a pod. Its server ends when the client has removed the worker, as it would after the grace period."""
        self._kubernetes.delete(index)
        wait_present(training, {worker.index for worker in training.strategy.cluster.workers} - {index})
        self.kill(index)

    def kill(self, index: int) -> None:
        """Ends a pod without notice."""
        self._cluster.kill("worker", index)
        self._kubernetes.remove(index)


def wait_present(training: Training, indices: Collection[int]) -> None:
    """Waits until the cluster has exactly these workers."""
    cluster = training.strategy.cluster
    wait_until(lambda: [worker.index for worker in cluster.workers] == sorted(indices), limit=120.0)


def scaled_up(pods: WorkerPods, kubernetes: FakeKubernetes, training: Training) -> None:
    with training.training_continues():
        for index in (2, 3):
            pods.create(index)
        wait_present(training, range(4))
        for index in (2, 3):
            training.run_on(index)


def scaled_down(pods: WorkerPods, kubernetes: FakeKubernetes, training: Training) -> None:
    with training.training_continues():
        for index in (3, 2):
            pods.delete(index, training)
        training.run_on(0)
    assert training.strategy.cluster.statistics().failed == 0


def pods_are_replaced_in_another_order(pods: WorkerPods, kubernetes: FakeKubernetes, training: Training) -> None:
    with training.training_continues():
        for index in (2, 3):
            pods.create(index)
        wait_present(training, range(4))
        pods.kill(1)
        pods.kill(3)
        wait_present(training, [0, 2])
        for returned, present in ((3, [0, 2, 3]), (1, range(4))):
            pods.create(returned)
            wait_present(training, present)
            training.run_on(returned)
    assert training.strategy.cluster.statistics().failed == 0


def changes_are_noticed_after_faults_of_the_api_server(
    pods: WorkerPods, kubernetes: FakeKubernetes, training: Training
) -> None:
    with training.training_continues():
        kubernetes.token = TOKEN
        kubernetes.forget()
        pods.delete(3, training)
        training.run_on(0)


def main() -> None:
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(workers=2, ps=1))
        kubernetes = stack.enter_context(FakeKubernetes())
        credentials = stack.enter_context(tempfile.TemporaryDirectory())
        pathlib.Path(credentials, "token").write_text(TOKEN)
        pods = WorkerPods(cluster, kubernetes)
        resolver = coordinator.KubernetesClusterResolver(
            cluster.resolver, selector=SELECTOR, api_server=kubernetes.url, credentials=credentials
        )
        with coordinator.ParameterServerStrategy(resolver) as strategy:
            training = Training(strategy)
            training.run_on(0)
            for case in (
                scaled_up,
                scaled_down,
                pods_are_replaced_in_another_order,
                changes_are_noticed_after_faults_of_the_api_server,
            ):
                began = time.monotonic()
                case(pods, kubernetes, training)
                print(f"{case.__name__}: {time.monotonic() - began:.1f} s", flush=True)  # noqa: T201
            # At least once each.
            assert training.count.numpy() >= strategy.cluster.statistics().finished - 20
            began = time.monotonic()
        print(f"closed in {time.monotonic() - began:.1f} s")  # noqa: T201


if __name__ == "__main__":
    main()
