"""A network, the rule that its gradients go through, and the step of its workers; it can start over.

So that cells which differ in their delay, or asynchronous ones in the number of their workers, share what takes seconds
to make: the rule's variables and the functions of a step.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.testbed.cell import SEQUENTIAL, SYNCHRONOUS, Cell
from coordinator.testbed.experiment import Experiment
from coordinator.testbed.network import new_network
from coordinator.updates.bounded_delay import BoundedDelay
from coordinator.updates.rule_statistics import Staleness
from coordinator.updates.rules.asynchronous import Asynchronous
from coordinator.updates.rules.delayed import Delayed
from coordinator.updates.state.gate import pause
from coordinator.updates.update_rule import UpdateRule


class Training:
    """What cells of a kind share.

    Args:
      strategy: where it runs.
      experiment: what is tried.
      shape: of an image: height, width and channels.
      cell: the first that is to be trained.
    """

    def __init__(
        self, strategy: ParameterServerStrategy, experiment: Experiment, shape: tuple[int, int, int], cell: Cell
    ) -> None:
        with strategy.scope():
            self._network = new_network(shape, experiment.seed)
            self._delay = tf.Variable(0.0, trainable=False)
            self._rule = self._new_rule(cell, experiment.learning_rate)
        self._first_weights = self._network.get_weights()
        self._seen_before: Sequence[int] = ()
        self.step = _new_step(self._network, self._rule, experiment.step_time)

    @staticmethod
    def kind(cell: Cell) -> Any:
        """What cells must have in common to share one."""
        return cell.mode, cell.workers if cell.mode == SYNCHRONOUS else None

    def start_over(self, cell: Cell) -> None:
        """Has the network as it was at first, and nothing of an earlier cell on its way to it."""
        if isinstance(self._rule, Delayed):
            self._rule.flush()
        self._network.set_weights(self._first_weights)
        self._delay.assign(cell.delay)
        self._seen_before = self._rule.statistics().staleness.histogram

    def mean_staleness(self) -> float:
        """Of the gradients that were applied since it last started over, in updates."""
        seen = self._rule.statistics().staleness.histogram
        pairs = itertools.zip_longest(seen, self._seen_before, fillvalue=0)
        return Staleness(tuple(now - before for now, before in pairs)).mean

    def _new_rule(self, cell: Cell, rate: float) -> UpdateRule:
        variables = self._network.trainable_variables
        if cell.mode == SEQUENTIAL:
            return Asynchronous(keras.optimizers.SGD(rate), variables)
        if cell.mode == SYNCHRONOUS:
            # Workers wait for each other. With `Synchronous` those that come late would compute in vain, which is no
            # affair of this experiment. The mean of n gradients with n times the rate is their sum: so each minibatch
            # changes the model by as much as in the other modes.
            optimizer = keras.optimizers.SGD(rate * cell.workers)
            return BoundedDelay(optimizer, variables, 0, grads_to_wait=cell.workers)
        return Delayed(keras.optimizers.SGD(rate), variables, lambda _worker, _time: self._delay.read_value())

    def __repr__(self) -> str:
        return f"<Training: {self._rule!r}>"


def _new_step(network: keras.Model, rule: UpdateRule, step_time: float) -> Any:
    """What a worker does again and again; gives the time at its end, in seconds, and the loss, both float64."""
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(minibatches: Any) -> Any:
        images, labels = next(minibatches)
        with tf.control_dependencies([images]):
            began = tf.timestamp()
        with rule.pull() as version:
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
