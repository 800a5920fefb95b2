"""A client of two workers, of which a third one joins and the first one leaves: which share of the data each reads.

First with `Options(reshard_inputs=True)`, then without. It ends with code 0 if each share is as expected.
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


def main(strategy: coordinator.ParameterServerStrategy, third: str, reshards: bool) -> None:
    iterator = iter(strategy.distribute_datasets_from_function(lambda context: sharded(context).repeat()))
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    def shares() -> list[tuple[int, int]]:
        """Returns two elements of each worker, which are the first of its share if the share is new."""
        futures = [worker.schedule(first_two, (iterator,)) for worker in strategy.cluster.workers]
        return [tuple(int(value) for value in future.result(TIMEOUT)) for future in futures]

    def steps_of_epoch() -> int:
        before = int(model.optimizer.iterations)
        model.fit(labelled, verbose=0)
        return int(model.optimizer.iterations) - before

    assert shares() == [(0, 2), (1, 3)]
    assert steps_of_epoch() == EXAMPLES
    strategy.cluster.add_worker(third)
    assert shares() == ([(0, 3), (1, 4), (2, 5)] if reshards else [(4, 6), (5, 7), (2, 5)])
    assert steps_of_epoch() == (EXAMPLES if reshards else EXAMPLES + EXAMPLES // 3)
    strategy.cluster.remove_worker(0)
    assert shares() == ([(0, 2), (1, 3)] if reshards else [(9, 11), (8, 11)])
    if reshards:
        assert steps_of_epoch() == EXAMPLES


if __name__ == "__main__":
    with LocalCluster(workers=2, ps=1) as cluster:
        address = cluster.start_worker()
        for is_asked in (True, False):
            options = coordinator.Options(reshard_inputs=is_asked)
            with coordinator.ParameterServerStrategy(cluster.resolver, options=options) as training:
                main(training, address, is_asked)
