"""The parts of a trial: a network, a file of images, the update rule of the gradients, and the step of the workers.

A `Training` can be reset, so that trials share its variables and functions, which take seconds to create. Trials that
differ only in their delay share a `Training`; asynchronous trials may also differ in the number of workers.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.simulation.distribution import RandomDelay
from coordinator.testbed.experiment import MOST_WORKERS, SEQUENTIAL, SYNCHRONOUS, Experiment, Trial
from coordinator.testbed.image_data import ImageData
from coordinator.testbed.step_times import Run
from coordinator.updates.rule_state import COUNTS, HISTOGRAM, STEPS, WAITED, pause
from coordinator.updates.rules.accumulating import BoundedDelay, Delayed
from coordinator.updates.rules.asynchronous import Asynchronous
from coordinator.updates.update_rule import UpdateRule

CLASSES = 10


def new_network(shape: tuple[int, int, int], seed: int) -> keras.Model:
    """Returns a network with initial weights from a seed: images [N, *shape] -> logits [N, 10], both float32.

    `shape` is height, width and channels of an image; each block of the network halves height and width down to 2.
    """
    keras.utils.set_random_seed(seed)
    layers, side, filters = [keras.Input(shape)], min(shape[:2]), 16
    while side > 2:
        layers += [
            keras.layers.Conv2D(filters, 3, padding="same", use_bias=False),
            # Trainings are short. Means over a hundred minibatches, as by default, would still contain initial values.
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
        ]
        side, filters = side // 2, min(2 * filters, 64)
    return keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(CLASSES)])


def new_loss() -> keras.losses.Loss:
    """Returns the loss function: the mean cross entropy of logits, in nats."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class HeldOut:
    """Images that are not trained on, and a network to predict their classes."""

    def __init__(self, data: ImageData) -> None:
        self._network = new_network(data.shape, 0)
        self._images = data.held_out_images.astype(np.float32) / data.highest
        self._labels = data.held_out_labels

    def accuracy(self, weights: Any) -> float:
        """Returns the share of the images, from 0 to 1, whose class a network with these weights predicts."""
        self._network.set_weights(weights)
        logits = self._network.predict(self._images, batch_size=1000, verbose=0)
        return float(np.mean(np.argmax(logits, axis=1) == self._labels))


class RecordFile:
    """A file of images and labels, which the workers of this machine read, so that no graph contains the images.

    Each record is a label, then an image, byte by byte.
    """

    def __init__(self, data: ImageData, path: pathlib.Path) -> None:
        self.data, self._path = data, path
        np.concatenate([data.labels[:, None], data.images.reshape(len(data.images), -1)], axis=1).tofile(path)

    def minibatches(self, batch_size: int, worker: int, workers: int, seed: int) -> tf.data.Dataset:
        """Returns a worker's part of the images, repeated without end and shuffled for each repetition.

        Each element is a pair of images, float32 [batch_size, height, width, channels] from 0 to 1, and labels, int32
        [batch_size].
        """
        # The order of the images depends on TensorFlow's global seed, too.
        tf.random.set_seed(seed)
        data = self.data

        def decoded(records: Any) -> Any:
            values = tf.reshape(tf.io.decode_raw(records, tf.uint8), [batch_size, -1])
            images = tf.reshape(tf.cast(values[:, 1:], tf.float32) / data.highest, [batch_size, *data.shape])
            return images, tf.cast(values[:, 0], tf.int32)

        records = tf.data.FixedLengthRecordDataset(str(self._path), 1 + int(np.prod(data.shape)))
        part = records.shard(workers, worker).cache().shuffle(len(data.images), seed=seed)
        return part.repeat().batch(batch_size, drop_remainder=True).map(decoded).prefetch(2)


def counts_of(rule: UpdateRule) -> tuple[int, Any, float]:
    """Returns a rule's counts so far: updates, gradients at each staleness (int64), seconds that all workers waited."""
    counts, seconds = (tensor.numpy() for tensor in rule.state.read())
    return int(counts[COUNTS.index("updates")]), counts[HISTOGRAM:STEPS], float(seconds[:, WAITED].sum())


def run_between(before: Any, after: Any, seconds: float, recorded: Sequence[Any]) -> Run:
    """Returns a run of some seconds with recorded times, from the counts of its rule before and after the run."""
    updates, histogram, waited = (new - old for new, old in zip(after, before, strict=True))
    return Run(seconds, updates, histogram, waited, recorded)


def paused(gradients: Sequence[Any], seconds: Any) -> list[Any]:
    """Returns gradients unchanged after a pause of `seconds`, a float64 scalar. The pause begins when it is known."""
    with tf.control_dependencies([pause(seconds)]):
        return [tf.identity(gradient) for gradient in gradients]


def timed_step(rule: UpdateRule, asked: Any, compute: Callable[[Any], tuple[Sequence[Any], Sequence[Any]]]) -> Any:
    """Pulls, computes and pushes in a graph; returns the recorded times of the step, then its figures; float64 [N].

    The step asked to begin at the time `asked`. `compute` gets the time at which the step has pulled, and returns
    gradients, and figures as float64 scalars.
    """
    with tf.control_dependencies([asked]), rule.pull() as version:
        with tf.control_dependencies([version]):
            pulled = tf.timestamp()
        gradients, figures = compute(pulled)
        with tf.control_dependencies(list(gradients)):
            computed = tf.timestamp()
        with tf.control_dependencies([computed]):
            accepted = rule.push([tf.identity(gradient) for gradient in gradients], version)
    with tf.control_dependencies([accepted]):
        return tf.stack([asked, pulled, computed, tf.timestamp(), *figures])


# The size of the table of equally likely delays. The table can be changed without tracing a step again.
_DELAYS = 256


class Training:
    """The network, rule and step that trials of one kind share. `shape` is height, width and channels of an image.

    The step returns its recorded times, then its loss; float64 [5].
    """

    def __init__(
        self, strategy: ParameterServerStrategy, experiment: Experiment, shape: tuple[int, int, int], trial: Trial
    ) -> None:
        averaged = trial.workers if trial.mode == SYNCHRONOUS else 1
        self._rule: UpdateRule
        with strategy.scope():
            optimizer = trial.descent.new_optimizer(averaged)
            self.network = new_network(shape, experiment.seed)
            self._delays = tf.Variable(tf.zeros([MOST_WORKERS, _DELAYS], tf.float64), trainable=False)
            variables = self.network.trainable_variables
            if trial.mode == SEQUENTIAL:
                self._rule = Asynchronous(optimizer, variables)
            elif trial.mode == SYNCHRONOUS:
                # With `max_delay=0`, workers wait for each other. The rule `Synchronous` would reject late gradients
                # instead, which this experiment does not study.
                self._rule = BoundedDelay(optimizer, variables, max_delay=0, grads_to_wait=averaged)
            else:
                self._rule = Delayed(optimizer, variables, delay=self._draw_delay)
        self._shape = shape
        self._fresh = [(variable, variable.numpy()) for variable in optimizer.variables]
        self._before = counts_of(self._rule)
        self.step = _new_step(self.network, self._rule, experiment.step_time)

    @staticmethod
    def kind(trial: Trial) -> Any:
        """Returns a key: trials with equal keys can share a training."""
        return trial.mode, trial.descent, trial.workers if trial.mode == SYNCHRONOUS else None

    def reset(self, trial: Trial, seed: int) -> None:
        """Resets the network to the initial weights of a seed; applies or drops all gradients of earlier trials."""
        if isinstance(self._rule, Delayed):
            self._rule.flush()
        self.network.set_weights(new_network(self._shape, seed).get_weights())
        for variable, value in self._fresh:
            variable.assign(value)
        delay = trial.delay
        if isinstance(delay, RandomDelay):
            self._delays.assign(np.stack([delay.table(worker, _DELAYS) for worker in range(MOST_WORKERS)]))
        else:
            self._delays.assign(np.full([MOST_WORKERS, _DELAYS], delay, np.float64))
        self._before = counts_of(self._rule)

    def run(self, seconds: float, recorded: Sequence[Any]) -> Run:
        """Returns the run since the last reset. The run took `seconds`; `recorded` has the times of its steps."""
        return run_between(self._before, counts_of(self._rule), seconds, recorded)

    def _draw_delay(self, worker: Any, _time: Any) -> Any:
        return tf.gather_nd(self._delays, [worker, tf.random.uniform([], 0, _DELAYS, tf.int64)])


def _new_step(network: keras.Model, rule: UpdateRule, step_time: float) -> Any:
    loss_of = new_loss()

    @tf.function
    def step(minibatches: Any) -> Any:
        images, labels = next(minibatches)
        with tf.control_dependencies([images]):
            asked = tf.timestamp()

        def compute(pulled: Any) -> tuple[list[Any], list[Any]]:
            with tf.GradientTape() as tape:
                loss = loss_of(labels, network(images, training=True))
            gradients = tape.gradient(loss, network.trainable_variables)
            with tf.control_dependencies(gradients):
                left = pulled + step_time - tf.timestamp()
            return paused(gradients, tf.maximum(left, 0.0)), [tf.cast(loss, tf.float64)]

        return timed_step(rule, asked, compute)

    return step
