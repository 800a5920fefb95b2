"""Trains the cells of a grid, one after another, on one cluster; each has a network and a rule of its own.

    cell 1 (1 worker)     worker 0: pull, compute, pause, push ...
    cell 2 (3 workers)    workers 0, 1 and 2
    cell 3 (2 workers)    workers 0 and 1; worker 2 rests

It promises that all begin with the same weights, and that a step takes no less than the experiment's step time, also if
the processor could be quicker: so a delay in seconds is as many steps on any machine.
"""

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.testbed.cell import SEQUENTIAL, SYNCHRONOUS, Cell
from coordinator.testbed.curve import Curve
from coordinator.testbed.experiment import Experiment
from coordinator.testbed.network import new_network
from coordinator.testbed.record_file import RecordFile
from coordinator.updates.asynchronous import Asynchronous
from coordinator.updates.bounded_delay import BoundedDelay
from coordinator.updates.delayed import Delayed
from coordinator.updates.gate import pause
from coordinator.updates.update_rule import UpdateRule

# A cell that takes so many times as long as its pauses, and so much longer, has something wrong with it.
_SLOWNESS, _PATIENCE = 20.0, 300.0


class Bench:
    """A cluster, and what is trained on it.

    Args:
      strategy: has at least the workers of the largest cell.
      experiment: what all cells have in common.
      records: the images.
      shape: of an image: height, width and channels.
    """

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        experiment: Experiment,
        records: RecordFile,
        shape: tuple[int, int, int],
    ) -> None:
        self._strategy = strategy
        self._experiment = experiment
        self._records = records
        self._shape = shape

    def train(self, cell: Cell, note: Callable[[], object] = lambda: None) -> Curve:
        """Trains one cell.

        Args:
          cell: which.
          note: called after each minibatch, on this thread.

        Raises:
          TimeoutError: it took far too long.
          Exception: what `ParameterServerStrategy.join` raises.
        """
        began = time.monotonic()
        with self._strategy.scope():
            network = new_network(self._shape, self._experiment.seed)
            rule = self._new_rule(cell, network.trainable_variables)
        step = _new_step(network, rule, self._experiment.step_time)
        minibatches = iter(self._strategy.experimental_distribute_datasets_from_function(self._dataset_of(cell)))
        turns = self._experiment.batches_of(cell) // cell.workers
        futures: list[concurrent.futures.Future[Any]] = [
            self._strategy.schedule(step, args=(minibatches,), worker=worker)
            for _ in range(turns)
            for worker in range(cell.workers)
        ]
        deadline = _PATIENCE + _SLOWNESS * turns * max(self._experiment.step_time, 0.01)
        for future in concurrent.futures.as_completed(futures, timeout=deadline):
            future.result()
            note()
        self._strategy.join()
        processed = np.array([future.result() for future in futures], np.float64)
        in_order = processed[np.argsort(processed[:, 0], kind="stable")]
        return Curve(cell, in_order[:, 1], rule.statistics().staleness.mean, time.monotonic() - began)

    def _new_rule(self, cell: Cell, variables: Sequence[Any]) -> UpdateRule:
        rate = self._experiment.learning_rate
        if cell.mode == SEQUENTIAL:
            return Asynchronous(keras.optimizers.SGD(rate), variables)
        if cell.mode == SYNCHRONOUS:
            # Workers wait for each other. With `Synchronous` those that come late would compute in vain, which is no
            # affair of this experiment. The mean of n gradients with n times the rate is their sum: so each minibatch
            # changes the model by as much as in the other modes.
            optimizer = keras.optimizers.SGD(rate * cell.workers)
            return BoundedDelay(optimizer, variables, 0, grads_to_wait=cell.workers)
        return Delayed(keras.optimizers.SGD(rate), variables, cell.delay)

    def _dataset_of(self, cell: Cell) -> Callable[[tf.distribute.InputContext], tf.data.Dataset]:
        size, seed = self._experiment.batch_size, self._experiment.seed

        def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
            # Workers that rest have a dataset as well, from which nothing is taken.
            worker = context.input_pipeline_id % cell.workers
            return self._records.minibatches(size, worker, cell.workers, seed)

        return dataset_fn

    def __repr__(self) -> str:
        return f"<Bench: {self._experiment}>"


def _new_step(network: keras.Model, rule: UpdateRule, step_time: float) -> Any:
    """What a worker does again and again; gives the time at its end, in seconds, and the loss, both float64."""
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(minibatches: Any) -> Any:
        images, labels = next(minibatches)
        with rule.pull() as version:
            with tf.control_dependencies([version]):
                began = tf.timestamp()
            with tf.GradientTape() as tape:
                loss = loss_of(labels, network(images, training=True))
            gradients = tape.gradient(loss, network.trainable_variables)
            accepted = rule.push(_paused(gradients, began, step_time), version)
        with tf.control_dependencies([accepted]):
            return tf.stack([tf.timestamp(), tf.cast(loss, tf.float64)])

    return step


def _paused(gradients: Sequence[Any], began: Any, step_time: float) -> list[Any]:
    """The same gradients, but not before the step time is over."""
    with tf.control_dependencies(list(gradients)):
        left = began + step_time - tf.timestamp()
    with tf.control_dependencies([pause(tf.maximum(left, 0.0))]):
        return [tf.identity(gradient) for gradient in gradients]
