"""Trains with data that the servers of serve.py prepare, and counts how often the model has seen each example.

coordinator run --workers 2 --ps 1 examples/data_service/train.py --dispatcher localhost:5050
"""

import argparse

import tensorflow as tf

import coordinator

SIZE, BATCH_SIZE = 2000, 10

service = tf.data.experimental.service


def prepared(size):
    """What the data servers run: all that is expensive. Whole batches travel, since each element is a call."""
    return tf.data.Dataset.range(size).batch(BATCH_SIZE).map(lambda ids: (ids, tf.cast(ids, tf.float32) / size))


def served(strategy, dispatcher, size, job):
    """Returns one pass over the data, divided among the workers as they ask for it."""
    target = f"grpc://{dispatcher}"
    dataset = prepared(size)
    dataset_id = service.register_dataset(target, dataset)

    def dataset_fn(_):
        return service.from_dataset_id(
            service.ShardingPolicy.DYNAMIC, target, dataset_id, element_spec=dataset.element_spec, job_name=job
        )

    return iter(strategy.experimental_distribute_datasets_from_function(dataset_fn))


def train(strategy, dispatcher, size=SIZE, job="epoch-0"):
    """Trains for one epoch; returns how often each example was seen."""
    with strategy.scope():
        visits = tf.Variable(lambda: tf.zeros([size], tf.int32), trainable=False)
    iterator = served(strategy, dispatcher, size, job)

    @tf.function
    def step(iterator):
        ids, _ = next(iterator)
        visits.scatter_nd_add(ids[:, tf.newaxis], tf.ones_like(ids, tf.int32))

    while True:
        try:
            strategy.schedule(step, args=(iterator,))
        except tf.errors.OutOfRangeError:
            break
    strategy.join()
    return visits.numpy()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dispatcher", default="localhost:5050", help="host:port")
    parser.add_argument("--job", default="epoch-0", help="a new name for each pass over the data")
    arguments = parser.parse_args()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    with coordinator.ParameterServerStrategy(resolver) as strategy:
        counts = train(strategy, arguments.dispatcher, job=arguments.job)
    print(
        f"{(counts == 1).sum()} examples once, {(counts == 0).sum()} never, {(counts > 1).sum()} more often", flush=True
    )
