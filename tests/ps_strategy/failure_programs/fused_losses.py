"""A client whose functions run several times in one call while a worker, and then a parameter server, is killed.

It prints one JSON object with what there is to be judged.
"""

import json
import tempfile
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster
from tests.deadline import wait_until

TIMEOUT = 150.0
STEPS = 32
OPTIONS = coordinator.Options(steps_per_dispatch=8)


def _slowly(number: Any) -> Any:
    """The same number."""
    matrix = tf.fill([600, 600], tf.cast(number, tf.float32) * 1e-3)
    for _ in range(4):
        matrix = tf.tanh(matrix @ matrix)
    # No tanh is more than 1, which TensorFlow does not know.
    return number + tf.cast(tf.reduce_min(matrix) > 2.0, number.dtype)


class Training:
    """A slow step that counts on both parameter servers, and notes which runs of it there were.

    Its data is slow too, so that a call which is cut off mostly waits for some.

    Attributes:
      fused: the sizes of the calls of several.
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
        runtime = strategy.cluster._runtime
        run_fused = runtime.run_fused

        def noted(worker: int, works: Any, cancellation: Any) -> Any:
            self.fused.append(len(works))
            return run_fused(worker, works, cancellation)

        runtime.run_fused = noted  # type: ignore[method-assign]

    def _step(self, batches: Any, number: Any) -> Any:
        self.traces += 1
        one = tf.cast(next(batches), tf.int32)
        with tf.control_dependencies([_slowly(one)]):
            self.runs.scatter_nd_add([[number]], [one])
            self.count.assign_add(one)
        return number

    def schedule(self, number: int, worker: int | None = None) -> coordinator.Future:
        return self.strategy.schedule(self._function, (self._iterator, tf.constant(number)), worker=worker)

    def run(self, lose: Callable[[], None] = lambda: None) -> list[int]:
        """All steps; their results. `lose` is called when a fused call is under way."""
        before = len(self.fused)
        futures = [self.schedule(number) for number in range(STEPS)]
        wait_until(lambda: len(self.fused) > before)
        lose()
        self.strategy.join(TIMEOUT)
        return [int(future.result(timeout=0)) for future in futures]


def lose_worker(cluster: LocalCluster, training: Training) -> dict[str, Any]:
    # An iterator is known to be endless when it is made.
    for worker in training.strategy.cluster.workers:
        training.schedule(0, worker.index).result(TIMEOUT)
    training.runs.assign(tf.zeros([STEPS], tf.int32))

    def lose() -> None:
        cluster.kill("worker", 0)
        cluster.restart("worker", 0)

    results = training.run(lose)
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


def main() -> None:
    with (
        LocalCluster(workers=2, ps=2) as cluster,
        tempfile.TemporaryDirectory() as folder,
        coordinator.ParameterServerStrategy(cluster.resolver, options=OPTIONS) as strategy,
    ):
        training = Training(strategy)
        seen = {"worker": lose_worker(cluster, training)}
        seen["parameter server"] = lose_parameter_server(cluster, training, folder)
    print(json.dumps(seen), flush=True)  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main()
