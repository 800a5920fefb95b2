"""A client whose parameter servers die, in one way after another; after each, a new strategy resumes a checkpoint.

It ends with code 0 if every case passes.
"""

import pathlib
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster
from tests.deadline import wait_until

TIMEOUT = 120.0
STEPS = 8


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

    def resume(self) -> None:
        """Restores the checkpoint, runs some steps, and saves it again."""
        if self._path.with_suffix(".index").exists():
            self._checkpoint.read(str(self._path)).assert_consumed()
        for _ in range(STEPS):
            self.schedule()
        self.strategy.join(TIMEOUT)
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
    # The futures raise nothing else: a function that did not encounter the loss itself was withdrawn.
    errors = {type(future.exception(timeout=0)) for future in futures} - {type(None)}
    assert coordinator.ParameterServerLost in errors
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


def main(cluster: LocalCluster, folder: pathlib.Path) -> None:
    def restart_one() -> None:
        cluster.restart("ps", 1)

    def kill_all_and_a_worker() -> None:
        for task in (("ps", 0), ("ps", 1), ("worker", 1)):
            cluster.kill(*task)

    cases = (([1], restart_one, False), ([0, 1], kill_all_and_a_worker, True), ([], None, False))
    for number, (servers, change, is_busy) in enumerate(cases):
        for task in cluster.processes:
            if not cluster.is_alive(*task):
                cluster.restart(*task)
        # Leaving its block joins, and closes although servers are lost.
        with coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
            training = Training(strategy, folder)
            training.resume()
            assert training.counts() == [STEPS * (number + 1)] * 2
            if change:
                lose(training, servers, change, is_busy)


if __name__ == "__main__":
    with LocalCluster(workers=2, ps=2) as servers_of_all_jobs, tempfile.TemporaryDirectory() as name:
        main(servers_of_all_jobs, pathlib.Path(name))
