"""A client that connects while servers are missing, dying and returning.

It ends with code 0 if every case passes.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import tensorflow as tf

import coordinator
from coordinator.launch.server_process import free_addresses
from coordinator.testing import LocalCluster
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import unhealthy

TIMEOUT = 120.0


def used_workers(strategy: coordinator.ParameterServerStrategy) -> set[int]:
    """Returns the workers that run functions scheduled now."""
    where = tf.function(coordinator.get_current_worker_index)
    futures = [strategy.schedule(where) for _ in range(10)]
    strategy.join(TIMEOUT)
    return {int(future.result()) for future in futures}


def wait_used(strategy: coordinator.ParameterServerStrategy, workers: set[int]) -> None:
    """Schedules until each of the workers has run something."""
    used: set[int] = set()

    def is_used_by_all() -> bool:
        used.update(used_workers(strategy))
        return used >= workers

    wait_until(is_used_by_all)


@contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """Runs `action` on another thread during the block."""
    failures: list[BaseException] = []

    def act() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - raised below, on the main thread
            failures.append(error)

    thread = threading.Thread(target=act, name="meanwhile")
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if failures:
        raise failures[0]


def nothing_listens() -> None:
    addresses = free_addresses(2)
    spec = tf.train.ClusterSpec({"worker": addresses[:1], "ps": addresses[1:]})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type="chief", task_id=0)
    start = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        coordinator.ParameterServerStrategy(resolver, options=coordinator.Options(connect_timeout=1.0))
    assert all(address in str(caught.value) for address in addresses), caught.value
    assert time.monotonic() - start < 20


def one_worker_is_down(cluster: LocalCluster) -> None:
    cluster.kill("worker", 1)
    with coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        assert used_workers(strategy) == {0}
        assert unhealthy(strategy) == ("/job:worker/replica:0/task:1",)
        cluster.restart("worker", 1)
        wait_used(strategy, {0, 1})
        assert unhealthy(strategy) == ()


def all_die_one_after_the_other(cluster: LocalCluster) -> None:
    cluster.kill("ps", 0)

    def die_and_return() -> None:
        for index in (0, 1):
            cluster.restart("worker", index, wait=False)
        cluster.restart("ps", 0, wait=False)
        cluster.wait_ready("worker", 0)
        cluster.restart("worker", 0)
        cluster.wait_ready("ps", 0)

    with meanwhile(die_and_return):
        strategy = coordinator.ParameterServerStrategy(cluster.resolver)
    with strategy:
        with strategy.scope():
            count = tf.Variable(0)
        add = tf.function(lambda: count.assign_add(1))
        wait_used(strategy, {0, 1})
        for _ in range(8):
            strategy.schedule(add)
        strategy.join(TIMEOUT)
        assert count.numpy() == 8


def main() -> None:
    nothing_listens()
    with LocalCluster(workers=2, ps=1) as cluster:
        one_worker_is_down(cluster)
        all_die_one_after_the_other(cluster)


if __name__ == "__main__":
    main()
