"""A client that connects while servers are missing, dying and returning.

It ends with code 0 if every case passes.
"""

import threading

import pytest
import tensorflow as tf

import coordinator
from coordinator.launch.server_process import free_addresses
from coordinator.testing import LocalCluster
from tests.ps_strategy.every_worker import on_every_worker, unhealthy

TIMEOUT = 120.0


def nothing_listens() -> None:
    addresses = free_addresses(2)
    spec = tf.train.ClusterSpec({"worker": addresses[:1], "ps": addresses[1:]})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type="chief", task_id=0)
    with pytest.raises(TimeoutError) as caught:
        coordinator.ParameterServerStrategy(resolver, options=coordinator.Options(connect_timeout=1.0))
    assert all(address in str(caught.value) for address in addresses), caught.value


def one_worker_is_down(cluster: LocalCluster) -> None:
    where = tf.function(coordinator.get_current_worker_index)
    cluster.kill("worker", 1)
    with coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        assert {int(strategy.schedule(where).result(TIMEOUT)) for _ in range(4)} == {0}
        assert unhealthy(strategy) == ("/job:worker/replica:0/task:1",)
        cluster.restart("worker", 1)
        assert on_every_worker(strategy, where) == [0, 1]
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

    meanwhile = threading.Thread(target=die_and_return)
    meanwhile.start()
    strategy = coordinator.ParameterServerStrategy(cluster.resolver)
    meanwhile.join()
    with strategy:
        with strategy.scope():
            count = tf.Variable(0)
        assert sorted(on_every_worker(strategy, tf.function(lambda: count.assign_add(1)))) == [1, 2]


if __name__ == "__main__":
    nothing_listens()
    with LocalCluster(workers=2, ps=1) as servers:
        one_worker_is_down(servers)
        all_die_one_after_the_other(servers)
