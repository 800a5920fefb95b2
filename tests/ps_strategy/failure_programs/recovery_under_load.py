"""Loses a parameter server while many fused calls run: all have results, and those after the restore ran once.

It ends with code 0 if that is so.
"""

import tempfile

import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster
from tests.deadline import wait_until

TIMEOUT = 240.0
STEPS = 3_000


def main(cluster: LocalCluster, strategy: coordinator.ParameterServerStrategy, folder: str) -> None:
    """Loses a server while many functions run."""
    with strategy.scope():
        counts = [tf.Variable(0, dtype=tf.int64) for _ in range(2)]
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(counts=counts), folder, max_to_keep=1)
    restored: list[tuple[list[int], int]] = []
    traces = []

    def finished() -> int:
        return strategy.cluster.statistics().finished

    @tf.function
    def step(number: tf.Tensor) -> tf.Tensor:
        traces.append(number)
        for count in counts:
            count.assign_add(1)
        return number

    def note(_: coordinator.Rollback) -> None:
        restored.append(([int(count) for count in counts], finished()))

    strategy.restore_from(manager, on_rollback=note)
    manager.save()
    futures = [strategy.schedule(step, (tf.constant(number),)) for number in range(STEPS)]
    wait_until(lambda: finished() > STEPS // 8)
    cluster.restart("ps", 1)
    strategy.join(TIMEOUT)
    assert [int(future.result()) for future in futures] == list(range(STEPS))
    [(values, before)] = restored
    assert [int(count) for count in counts] == [value + finished() - before for value in values]
    assert len(traces) == 1


if __name__ == "__main__":
    with (
        LocalCluster(workers=2, ps=2) as servers,
        tempfile.TemporaryDirectory() as name,
        coordinator.ParameterServerStrategy(
            servers.resolver, options=coordinator.Options(steps_per_dispatch=16)
        ) as training,
    ):
        main(servers, training, name)
