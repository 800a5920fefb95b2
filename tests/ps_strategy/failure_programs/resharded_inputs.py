"""A client of two workers, of which a third one joins and the first one leaves: which share of the data each reads.

With `Options(reshard_inputs=True)`. It ends with code 0 if each share is as expected.
"""

import keras
import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster

TIMEOUT = 120.0
EXAMPLES = 12


def sharded(context: tf.distribute.InputContext) -> tf.data.Dataset:
    return tf.data.Dataset.range(EXAMPLES).shard(context.num_input_pipelines, context.input_pipeline_id)


def labelled(context: tf.distribute.InputContext) -> tf.data.Dataset:
    return sharded(context).batch(1).map(lambda x: (tf.cast(x[:, tf.newaxis], tf.float32), x))


@tf.function
def first_two(iterator: tf.data.Iterator) -> tuple[tf.Tensor, tf.Tensor]:
    return next(iterator), next(iterator)


def main(strategy: coordinator.ParameterServerStrategy, third: str) -> None:
    iterator = iter(strategy.distribute_datasets_from_function(lambda context: sharded(context).repeat()))
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    def check(*shares: tuple[int, int]) -> None:
        """Checks two elements of each worker, which are the first of its share, and the steps of an epoch of `fit`."""
        futures = [worker.schedule(first_two, (iterator,)) for worker in strategy.cluster.workers]
        assert [tuple(map(int, future.result(TIMEOUT))) for future in futures] == [*shares]
        before = int(model.optimizer.iterations)
        model.fit(labelled, verbose=0)
        assert int(model.optimizer.iterations) - before == EXAMPLES

    check((0, 2), (1, 3))
    strategy.cluster.add_worker(third)
    check((0, 3), (1, 4), (2, 5))
    strategy.cluster.remove_worker(0)
    check((0, 2), (1, 3))


if __name__ == "__main__":
    options = coordinator.Options(reshard_inputs=True)
    with (
        LocalCluster(workers=2, ps=1) as cluster,
        coordinator.ParameterServerStrategy(cluster.resolver, options=options) as training,
    ):
        main(training, cluster.start_worker())
