"""Counts in the model how often each example was trained, while servers are killed at random.

python examples/exactly_once/train.py --seed 3

Each step adds its examples' numbers to one table and one to another, on two parameter servers. Workers and parameter
servers are killed and started again meanwhile. At the end, the tables say how many examples the model has never seen,
and how many it has seen again: none. Kill the program itself too, and start it again with the same `--directory`: it
continues from its latest checkpoint, also with other numbers of workers and parameter servers.
"""

import argparse
import tempfile
import time

import numpy as np
import tensorflow as tf

import coordinator
from coordinator.testing import Chaos, LocalCluster

EXAMPLES, BATCH_SIZE, EPOCHS, SECONDS_PER_CHECKPOINT = 10_000, 10, 2, 5.0


def add(table, gradient, learning_rate):
    """The update function: adds rows to a table."""
    table.scatter_nd_add(gradient.indices[:, tf.newaxis], gradient.values * learning_rate)


def train(strategy, directory, chaos):
    numbers = np.arange(EXAMPLES, dtype=np.int64)
    source = coordinator.data.arrays(numbers)
    epochs = coordinator.data.Epochs(source, BATCH_SIZE, EPOCHS, shuffle=17)
    with strategy.scope():
        # On two parameter servers, if there are two.
        sums = tf.Variable(lambda: tf.zeros([EXAMPLES], tf.float32))
        counts = tf.Variable(lambda: tf.zeros([EXAMPLES], tf.float32))
        rule = coordinator.updates.Asynchronous(add, [sums, counts], learning_rate=1.0, once=epochs)

    @tf.function
    def step(positions):
        (ids,) = tf.nest.flatten(source.read(positions))
        with rule.pull() as version:
            ones = tf.ones_like(ids, tf.float32)
        gradients = [tf.IndexedSlices(tf.cast(ids, tf.float32), ids), tf.IndexedSlices(ones, ids)]
        rule.push(gradients, version, positions=positions)

    # The rule as well: it records which ranges are in the model.
    checkpoint = tf.train.Checkpoint(sums=sums, counts=counts, rule=rule, epochs=epochs)
    manager = tf.train.CheckpointManager(checkpoint, directory, max_to_keep=3)
    manager.restore_or_initialize()
    strategy.restore_from(manager)
    print(f"{epochs.remaining} ranges are left", flush=True)
    saved_at = time.monotonic()
    with chaos:
        for positions in epochs.on(strategy):
            strategy.schedule(step, args=(positions,))
            if time.monotonic() - saved_at > SECONDS_PER_CHECKPOINT:
                manager.save()
                saved_at = time.monotonic()
        manager.save()
    return sums.numpy(), counts.numpy()


def main(arguments):
    with LocalCluster(workers=arguments.workers, ps=arguments.ps) as cluster:
        chaos = Chaos(cluster, seed=arguments.seed, jobs=("worker", "ps"), kinds=("kill",), interval=10.0)
        with coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
            sums, counts = train(strategy, arguments.directory, chaos)
    faults = [f"{fault.kind} {fault.job} {fault.index}" for fault in chaos.faults]
    print(f"{len(faults)} faults: {', '.join(faults)}")
    never = int(np.maximum(EPOCHS - counts, 0).sum())
    repeated = int(np.maximum(counts - EPOCHS, 0).sum())
    print(f"examples never seen: {never}, seen again: {repeated}", flush=True)
    if never or repeated or (sums != np.arange(EXAMPLES) * EPOCHS).any():
        raise SystemExit("The model has not seen each example once in each epoch.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument("--directory", default=None, help="for checkpoints; by default a temporary one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        given.directory = given.directory or temporary
        main(given)
