"""Loses a parameter server again and again while many fused calls run, and counts the effects of the steps after it.

Its arguments are how often the server is lost, and how many steps are scheduled each time. It prints a line for each
loss: the counts on the parameter servers, and what they are if each step after the restore ran exactly once.
"""

import json
import sys
import tempfile

import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster
from tests.deadline import wait_until

TIMEOUT = 240.0
WORKERS, SERVERS = 3, 2


def main(losses: int, steps: int) -> None:
    """Runs all losses with one strategy and one set of variables."""
    with LocalCluster(workers=WORKERS, ps=SERVERS) as cluster, tempfile.TemporaryDirectory() as folder:
        options = coordinator.Options(steps_per_dispatch=16)
        with coordinator.ParameterServerStrategy(cluster.resolver, options=options) as strategy:
            with strategy.scope():
                counts = [tf.Variable(0, dtype=tf.int64) for _ in range(SERVERS)]
            checkpoint = tf.train.Checkpoint(**{f"count{index}": count for index, count in enumerate(counts)})
            manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=1)
            restored: list[tuple[list[int], int]] = []

            def note(_: coordinator.Rollback) -> None:
                restored.append(([int(count) for count in counts], strategy.cluster.statistics().finished))

            @tf.function
            def step() -> None:
                for count in counts:
                    count.assign_add(1)

            for loss in range(losses):
                manager.save()
                strategy.restore_from(manager, on_rollback=note)
                begin = strategy.cluster.statistics().finished
                for _ in range(steps):
                    strategy.schedule(step)
                wait_until(lambda start=begin: strategy.cluster.statistics().finished > start + steps // 8)
                cluster.kill("ps", loss % SERVERS)
                cluster.restart("ps", loss % SERVERS)
                strategy.join(TIMEOUT)
                values, finished = restored[-1] if len(restored) > loss else ([-1] * SERVERS, 0)
                since = strategy.cluster.statistics().finished - finished
                found = {"counts": [int(count) for count in counts], "expected": [value + since for value in values]}
                json.dump({**found, "recoveries": len(restored)}, sys.stdout)
                sys.stdout.write("\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
