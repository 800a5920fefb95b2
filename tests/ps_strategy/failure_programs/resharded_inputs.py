"""A client of two workers, of which a third one joins and the first one leaves: which share of the data each reads.

Its argument is `True` with `Options(reshard_inputs=True)`.
"""

import sys

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


class Program:
    """An endless iterator, and a model that is trained on each share once in each epoch."""

    def __init__(self, strategy: coordinator.ParameterServerStrategy) -> None:
        self.strategy = strategy
        endless = strategy.distribute_datasets_from_function(lambda context: sharded(context).repeat())
        self._iterator = iter(endless)
        with strategy.scope():
            self._model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            self._model.compile("sgd", "mse")

    def shares(self) -> list[tuple[int, int]]:
        """Returns two elements of each worker, which are the first of its share if the share is new."""
        futures = [worker.schedule(first_two, (self._iterator,)) for worker in self.strategy.cluster.workers]
        return [tuple(int(value) for value in future.result(TIMEOUT)) for future in futures]

    def steps_of_epoch(self) -> int:
        before = int(self._model.optimizer.iterations)
        self._model.fit(labelled, verbose=0)
        return int(self._model.optimizer.iterations) - before


def main(reshards: bool) -> None:
    options = coordinator.Options(reshard_inputs=reshards)
    with (
        LocalCluster(workers=2, ps=1) as cluster,
        coordinator.ParameterServerStrategy(cluster.resolver, options=options) as strategy,
    ):
        program = Program(strategy)
        assert program.shares() == [(0, 2), (1, 3)]
        assert program.steps_of_epoch() == EXAMPLES
        strategy.cluster.add_worker(cluster.start_worker())
        expected = [(0, 3), (1, 4), (2, 5)] if reshards else [(4, 6), (5, 7), (2, 5)]
        assert program.shares() == expected
        assert program.steps_of_epoch() == (EXAMPLES if reshards else EXAMPLES + EXAMPLES // 3)
        strategy.cluster.remove_worker(0)
        expected = [(0, 2), (1, 3)] if reshards else [(9, 11), (8, 11)]
        assert program.shares() == expected
        if reshards:
            assert program.steps_of_epoch() == EXAMPLES


if __name__ == "__main__":
    main(sys.argv[1] == "True")
