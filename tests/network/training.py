"""A client that trains exactly once on two parameter servers, until its standard input says that it is to end.

Its argument is the folder of its checkpoints. Each second it prints how many functions each worker has finished since,
and in the end, as JSON, how many counters are wrong.
"""

import json
import logging
import sys
import threading

import numpy as np
import tensorflow as tf

import coordinator

EXAMPLES, BATCH = 500, 10


def add(variable: tf.Variable, gradient: tf.IndexedSlices, learning_rate: tf.Tensor) -> None:
    variable.scatter_nd_add(gradient.indices[:, None], gradient.values * learning_rate)


def main(folder: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    with coordinator.ParameterServerStrategy(resolver) as strategy:
        source = coordinator.data.arrays(np.arange(EXAMPLES, dtype=np.int64))
        epochs = coordinator.data.Epochs(source, BATCH, 10**9, shuffle=5)
        with strategy.scope():
            counts = [tf.Variable(lambda: tf.zeros([EXAMPLES])) for _ in range(2)]
            rule = coordinator.updates.Asynchronous(add, counts, learning_rate=1.0, once=epochs)

        @tf.function
        def step(positions: tf.Tensor) -> None:
            (ids,) = tf.nest.flatten(source.read(positions))
            with rule.pull() as version:
                gradient = tf.IndexedSlices(tf.ones_like(ids, tf.float32), ids)
            rule.push([gradient, gradient], version, positions=positions)

        checkpoint = tf.train.Checkpoint(counts=counts, rule=rule, epochs=epochs)
        manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
        strategy.restore_from(manager)
        ended = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
        threading.Thread(target=show_progress, args=(strategy, ended), daemon=True).start()
        while not ended.is_set():
            for positions in epochs.on(strategy, until=epochs.epoch + 4):
                strategy.schedule(step, args=(positions,))
            manager.save()
        strategy.join()
        wrong = [int((count.numpy() != epochs.epoch).sum()) for count in counts]
    print(json.dumps({"wrong": wrong, "epochs": epochs.epoch}), flush=True)  # noqa: T201 - its answer


def show_progress(strategy: coordinator.ParameterServerStrategy, ended: threading.Event) -> None:
    before = [0, 0]
    while not ended.wait(1.0):
        finished = [worker.finished for worker in strategy.cluster.statistics().workers]
        made = [now - then for now, then in zip(finished, before, strict=True)]
        print("progress", *made, flush=True)  # noqa: T201 - what the test waits for
        before = finished


if __name__ == "__main__":
    main(sys.argv[1])
