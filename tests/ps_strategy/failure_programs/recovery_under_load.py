"""Loses a parameter server while many fused calls run: all have results, and those after the restore ran once.

It ends with code 0 if that is so for each parameter server in turn.
"""

import tempfile

import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster
from tests.deadline import wait_until

TIMEOUT = 240.0
STEPS = 3_000


def main(cluster: LocalCluster, strategy: coordinator.ParameterServerStrategy, folder: str) -> None:
    """Runs all losses with one strategy and one set of variables."""
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
    for lost in (0, 1):
        manager.save()
        begin = finished()
        futures = [strategy.schedule(step, (tf.constant(number),)) for number in range(STEPS)]
        wait_until(lambda least=begin + STEPS // 8: finished() > least)
        cluster.restart("ps", lost)
        strategy.join(TIMEOUT)
        assert [int(future.result()) for future in futures] == list(range(STEPS))
        assert len(restored) == lost + 1, "each loss had to be recovered from once"
        values, before = restored[-1]
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
