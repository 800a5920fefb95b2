"""A client that trains on servers of the test; it is killed in the middle of training, or trains to the end.

Its arguments are the cluster specification as JSON, and `killed` or `to the end`.
"""

import json
import os
import signal
import sys

import tensorflow as tf

import coordinator

STEPS = 10


def connect(spec: str, **options: float) -> coordinator.ParameterServerStrategy:
    """Connects to servers of the test, given as JSON."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(json.loads(spec)), task_type="chief", task_id=0
    )
    return coordinator.ParameterServerStrategy(resolver, options=coordinator.Options(**options))


def main(spec: str, ending: str) -> None:
    with connect(spec) as strategy:
        with strategy.scope():
            count = tf.Variable(0)
        dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(1, 2).repeat())
        iterator = iter(dataset)

        @tf.function
        def step(batches: tf.data.Iterator) -> None:
            count.assign_add(tf.cast(next(batches), tf.int32))

        for _ in range(STEPS):
            strategy.schedule(step, args=(iterator,))
        strategy.join()
        print(f"{count.numpy()} steps", flush=True)  # noqa: T201 - the test reads it
        futures = [strategy.schedule(step, args=(iterator,)) for _ in range(STEPS)]
        if ending == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        strategy.join()
        print(f"{len(futures)} more", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
