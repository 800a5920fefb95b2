"""A client whose servers are missing, die and return, while it connects, trains and closes.

After each loss of a parameter server a new strategy resumes a checkpoint. It ends with code 0 if every case passes.
"""

import pathlib
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import coordinator
from coordinator.launch.server_process import free_addresses
from coordinator.testing import LocalCluster
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import on_every_worker, unhealthy

TIMEOUT = 120.0
STEPS = 8


def nothing_listens() -> None:
    addresses = free_addresses(2)
    spec = tf.train.ClusterSpec({"worker": addresses[:1], "ps": addresses[1:]})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type="chief", task_id=0)
    with pytest.raises(TimeoutError) as caught:
        coordinator.ParameterServerStrategy(resolver, options=coordinator.Options(connect_timeout=0.2))
    assert all(address in str(caught.value) for address in addresses), caught.value


class Training:
    """A step that counts on each of two parameter servers, and a checkpoint of the counts."""

    def __init__(self, strategy: coordinator.ParameterServerStrategy, folder: pathlib.Path) -> None:
        self.strategy = strategy
        with strategy.scope():
            counts = [tf.Variable(0), tf.Variable(0)]
        self._checkpoint = tf.train.Checkpoint(counts=counts)
        self._path = folder / "checkpoint"
        step = tf.function(lambda: sum(count.assign_add(1) for count in counts))
        self.schedule = lambda: strategy.schedule(step)
        self.counts = lambda: [int(count.numpy()) for count in counts]

    def create_more(self) -> None:
        """Creates a variable on each server."""
        with self.strategy.scope():
            for _ in range(2):
                tf.Variable(0)

    def resume(self, times: int) -> None:
        """Restores the checkpoint, runs some steps, and saves it again, for the n-th time."""
        if self._path.with_suffix(".index").exists():
            self._checkpoint.read(str(self._path)).assert_consumed()
        for _ in range(STEPS):
            self.schedule()
        self.strategy.join(TIMEOUT)
        assert self.counts() == [STEPS * times] * 2
        self._checkpoint.write(str(self._path))


def check_lost(call: Callable[[], Any], server: int) -> None:
    """The call raises an error that names the lost server."""
    with pytest.raises(coordinator.ParameterServerLost) as caught:
        call()
    text = "".join(traceback.format_exception(caught.value))
    assert caught.value.task == f"/job:ps/task:{server}"
    assert f"ParameterServerLost: The parameter server /job:ps/task:{server} was lost (127." in text
    assert "GRPC" not in text, "TensorFlow's text is logged at DEBUG"


def lose(training: Training, servers: list[int], change: Callable[[], None], is_busy: bool) -> None:
    """Lets a change happen, while functions run and wait or between two calls, by which these servers are lost."""
    strategy = training.strategy
    futures = [training.schedule() for _ in range(2_000)] if is_busy else []
    if futures:
        futures[20].result(TIMEOUT)
    change()
    if not is_busy:
        futures.append(training.schedule())
    check_lost(lambda: strategy.join(TIMEOUT), servers[0])
    # The futures raise nothing else: a function (perhaps the only one) that did not meet the loss itself was withdrawn.
    errors = {type(future.exception(timeout=0)) for future in futures} - {type(None)}
    assert coordinator.ParameterServerLost in errors or not is_busy
    assert errors <= {coordinator.ParameterServerLost, coordinator.ClosureCancelledError}
    # A join after more work, and the schedule after the work that failed.
    check_lost(lambda: (training.schedule(), strategy.join(TIMEOUT)), servers[0])
    wait_until(training.schedule().done)
    check_lost(training.schedule, servers[0])
    check_lost(training.create_more, servers[0])
    # The client's own reads are TensorFlow's.
    with pytest.raises(tf.errors.OpError):
        training.counts()
    assert [server.healthy() for server in strategy.parameter_servers] == [index not in servers for index in (0, 1)]


def a_worker_is_down_and_a_parameter_server_restarts(cluster: LocalCluster, folder: pathlib.Path) -> None:
    where = tf.function(coordinator.get_current_worker_index)
    cluster.kill("worker", 1)
    with coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        assert {int(strategy.schedule(where).result(TIMEOUT)) for _ in range(4)} == {0}
        assert unhealthy(strategy) == ("/job:worker/replica:0/task:1",)
        cluster.restart("worker", 1)
        assert on_every_worker(strategy, where) == [0, 1]
        wait_until(lambda: not unhealthy(strategy))
        training = Training(strategy, folder)
        training.resume(1)
        lose(training, [1], lambda: cluster.restart("ps", 1), is_busy=False)


def all_and_a_worker_die_while_functions_run(cluster: LocalCluster, folder: pathlib.Path) -> None:
    def kill() -> None:
        for task in (("ps", 0), ("ps", 1), ("worker", 1)):
            cluster.kill(*task)

    # Leaving its block joins, and closes although servers are lost.
    with coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        training = Training(strategy, folder)
        training.resume(2)
        lose(training, [0, 1], kill, is_busy=True)


def all_return_one_after_the_other_while_it_connects(cluster: LocalCluster, folder: pathlib.Path) -> None:
    def die_and_return() -> None:
        for task in (("worker", 0), ("worker", 1), ("ps", 1), ("ps", 0)):
            cluster.restart(*task, wait=False)
        cluster.wait_ready("worker", 0)
        cluster.restart("worker", 0)
        cluster.wait_ready("ps", 0)

    meanwhile = threading.Thread(target=die_and_return)
    meanwhile.start()
    with coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        meanwhile.join()
        training = Training(strategy, folder)
        training.resume(3)
        assert on_every_worker(strategy, tf.function(coordinator.get_current_worker_index)) == [0, 1]


if __name__ == "__main__":
    nothing_listens()
    with LocalCluster(workers=2, ps=2) as servers_of_all_jobs, tempfile.TemporaryDirectory() as name:
        for case in (
            a_worker_is_down_and_a_parameter_server_restarts,
            all_and_a_worker_die_while_functions_run,
            all_return_one_after_the_other_while_it_connects,
        ):
            case(servers_of_all_jobs, pathlib.Path(name))
