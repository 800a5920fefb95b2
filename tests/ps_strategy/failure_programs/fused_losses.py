"""A client whose functions run several times in one call while servers are killed, frozen, added, moved and removed.

It takes the names of scenarios, and prints one JSON object with the observations of each.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import coordinator
from coordinator.ps_strategy.calls.tensorflow_runtime import TensorFlowRuntime
from coordinator.testing import LocalCluster
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import unhealthy

TIMEOUT = 150.0
STEPS = 16
OPTIONS = coordinator.Options(
    steps_per_dispatch=8, reconnect_interval=0.1, heartbeat_interval=0.2, heartbeat_timeout=2.0
)


def _slowly(number: Any) -> Any:
    """Returns the same number, slowly."""
    matrix = tf.fill([600, 600], tf.cast(number, tf.float32) * 1e-3)
    for _ in range(4):
        matrix = tf.tanh(matrix @ matrix)
    # No tanh is greater than 1, but TensorFlow cannot fold this.
    return number + tf.cast(tf.reduce_min(matrix) > 2.0, number.dtype)


class Training:
    """A slow step that counts on both parameter servers, and records which of its runs there were.

    Its data is slow too, so that a call is mostly waiting for data when it is cut off.

    Attributes:
      fused: the workers of the fused calls.
    """

    def __init__(self, strategy: coordinator.ParameterServerStrategy) -> None:
        self.strategy = strategy
        self.traces = 0
        self.fused: list[int] = []
        with strategy.scope():
            self.runs = tf.Variable(tf.zeros([STEPS], tf.int32))
            self.count = tf.Variable(0)
        data = tf.data.Dataset.range(1, 2).repeat().map(_slowly)
        self._iterator = iter(strategy.experimental_distribute_dataset(data))
        self._function = tf.function(self._step)
        run_fused = TensorFlowRuntime.run_fused

        def recorded(runtime: TensorFlowRuntime, worker: int, works: Any, cancellation: Any) -> Any:
            self.fused.append(worker)
            return run_fused(runtime, worker, works, cancellation)

        TensorFlowRuntime.run_fused = recorded  # type: ignore[method-assign]

    def _step(self, batches: Any, number: Any) -> Any:
        self.traces += 1
        one = tf.cast(next(batches), tf.int32)
        with tf.control_dependencies([_slowly(one)]):
            self.runs.scatter_nd_add([[number]], [one])
            self.count.assign_add(one)
        return number

    def schedule(self, number: int, worker: int | None = None) -> coordinator.Future:
        return self.strategy.schedule(self._function, (self._iterator, tf.constant(number)), worker=worker)

    def run(self, lose: Callable[[], None] = lambda: None, worker: int | None = None) -> list[int]:
        """Runs all steps, calls `lose` during a fused call on a worker, None for any, and returns the results."""
        before = len(self.fused)
        futures = [self.schedule(number) for number in range(STEPS)]
        wait_until(lambda: any(worker in (None, each) for each in self.fused[before:]))
        lose()
        self.strategy.join(TIMEOUT)
        return [int(future.result(timeout=0)) for future in futures]


def make_endless(training: Training) -> None:
    """Runs one step on each worker: an iterator is known to be endless once it is created."""
    for worker in training.strategy.cluster.workers:
        training.schedule(0, worker.index).result(TIMEOUT)
    training.runs.assign(tf.zeros([STEPS], tf.int32))


def lose_worker(cluster: LocalCluster, training: Training) -> dict[str, Any]:
    def lose() -> None:
        cluster.kill("worker", 0)
        cluster.restart("worker", 0)

    results = training.run(lose, worker=0)
    training.strategy.settled(TIMEOUT)
    statistics = training.strategy.cluster.statistics()
    return {
        "results": results,
        "fewest runs": int(min(training.runs.numpy())),
        "retried": statistics.retried,
        "losses": statistics.workers[0].losses,
    }


def lose_parameter_server(cluster: LocalCluster, training: Training, folder: str) -> dict[str, Any]:
    checkpoint = tf.train.Checkpoint(runs=training.runs, count=training.count)
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=1)
    training.count.assign(1000)
    manager.save()
    training.strategy.restore_from(manager)
    traces = training.traces

    def lose() -> None:
        cluster.kill("ps", 1)
        cluster.restart("ps", 1)

    results = training.run(lose)
    count, fused = int(training.count.numpy()), len(training.fused)
    results_afterwards = training.run()
    return {
        "results": results,
        "counted since the checkpoint": count - 1000,
        "results afterwards": results_afterwards,
        "counted afterwards": int(training.count.numpy()) - count,
        "fused afterwards": len(training.fused) - fused,
        "traced again": training.traces - traces,
    }


def freeze_worker(cluster: LocalCluster, training: Training) -> dict[str, Any]:
    def losses() -> int:
        return training.strategy.cluster.statistics().workers[1].losses

    before = losses()
    results = training.run(lambda: cluster.freeze("worker", 1), worker=1)
    wait_until(lambda: losses() > before)
    after = losses()
    cluster.thaw("worker", 1)
    wait_until(lambda: not unhealthy(training.strategy))
    return {"results": results, "losses": after - before}


def change_workers(cluster: LocalCluster, training: Training) -> dict[str, Any]:
    workers = training.strategy.cluster
    added = workers.add_worker(cluster.start_worker())
    result = training.schedule(3, added).result(TIMEOUT)
    cluster.kill("worker", 0)
    workers.move_worker(0, cluster.start_worker())
    result_after_move = training.schedule(4, 0).result(TIMEOUT)
    workers.remove_worker(added)
    return {
        "added": added,
        "results": [int(result), int(result_after_move)],
        "workers left": [worker.index for worker in workers.workers],
        "results afterwards": training.run(),
    }


def main() -> None:
    with (
        LocalCluster(workers=2, ps=2) as cluster,
        tempfile.TemporaryDirectory() as folder,
        coordinator.ParameterServerStrategy(cluster.resolver, options=OPTIONS) as strategy,
    ):
        training = Training(strategy)
        make_endless(training)
        scenarios = {
            "worker": lambda: lose_worker(cluster, training),
            "parameter server": lambda: lose_parameter_server(cluster, training, folder),
            "frozen worker": lambda: freeze_worker(cluster, training),
            "changing workers": lambda: change_workers(cluster, training),
        }
        seen = {name: scenarios[name]() for name in sys.argv[1:]}
    print(json.dumps(seen), flush=True)  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main()
