"""One training under one rule: a new network, steps that pause between pull and push, and their figures."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

import coordinator
from benchmarks.staleness_digits import Digits, cross_entropy, new_model
from benchmarks.staleness_pauses import Pauses
from benchmarks.staleness_rules import WORKERS, RuleChoice
from coordinator.testbed.training import paused
from coordinator.updates import RuleStatistics, UpdateRule

DEADLINE = 300.0
# The number of scheduled or running steps of each worker: enough that none waits for the client.
AHEAD = 2


class TrainingCluster:
    """The strategy and the minibatches of its workers, which all trainings share.

    Args:
      strategy: a strategy with `WORKERS` workers.
    """

    def __init__(self, strategy: coordinator.ParameterServerStrategy) -> None:
        self.strategy = strategy
        self.digits = Digits()
        self.minibatches = self.digits.minibatches(strategy)


class Training:
    """A network that is trained under a rule. Creating it runs one step on every worker, which is not measured.

    Args:
      shared: the cluster.
      choice: the rule.
      pauses: the pauses of steps between pull and push.
      learning_rate: the learning rate of plain SGD.
      seed: the seed of the network's initial weights.
      pushes: the number of gradients that a step pushes, all computed on the model that it pulled at its beginning.
        More than one makes gradients as stale as many workers would.
    """

    def __init__(
        self,
        shared: TrainingCluster,
        choice: RuleChoice,
        pauses: Pauses,
        *,
        learning_rate: float,
        seed: int,
        pushes: int = 1,
    ) -> None:
        self._shared = shared
        self._choice = choice
        with shared.strategy.scope():
            self.model = new_model(seed)
            self.rule: Any = choice.make(keras.optimizers.SGD(learning_rate), self.model.trainable_variables)
        self._step = _one_push(self.model, self.rule, pauses) if pushes == 1 else _pushes(self.model, self.rule, pushes)
        self.seconds = 0.0
        self.steps = 0
        self._warm_up()

    def train(self, may_go_on: Callable[[], bool]) -> None:
        """Schedules steps while `may_go_on()`, at most `AHEAD` for each worker, and waits for the last."""
        room = threading.Semaphore(AHEAD * WORKERS)
        began, seconds_before = time.monotonic(), self.seconds
        while may_go_on():
            room.acquire()
            number = tf.constant(self.steps, tf.int64)
            future = self._shared.strategy.schedule(self._step, args=(self._shared.minibatches, number))
            future.add_done_callback(lambda _: room.release())
            self.steps += 1
            self.seconds = seconds_before + time.monotonic() - began
        self._shared.strategy.join(DEADLINE)
        self.seconds = seconds_before + time.monotonic() - began

    @contextlib.contextmanager
    def settled(self) -> Iterator[keras.Model]:
        """Returns a scope in which nothing trains and the model has all steps so far applied."""
        if self._choice.is_averaged:
            self.rule.abort()
        yield self.model
        if self._choice.is_averaged:
            self.rule.resume()

    def accuracy(self) -> float:
        """Returns the accuracy on the held-out images, from 0 to 1."""
        with self.settled() as model:
            return self._shared.digits.accuracy(model)

    def loss(self) -> float | None:
        """Returns the mean loss of the training images; None if it is not finite."""
        with self.settled() as model:
            return self._shared.digits.loss(model)

    def statistics(self) -> RuleStatistics:
        """Returns the rule's statistics since the warm-up."""
        return self.rule.statistics()

    def _warm_up(self) -> None:
        for worker in range(WORKERS):
            number = tf.constant(worker, tf.int64)
            self._shared.strategy.schedule(self._step, args=(self._shared.minibatches, number), worker=worker)
        self._shared.strategy.join(DEADLINE)
        state = self.rule.state
        for seen in (state.counts, state.seconds):
            seen.assign(tf.zeros_like(seen))


def _one_push(model: keras.Model, rule: UpdateRule, pauses: Pauses) -> Any:
    """Returns a step that the rule repeats with a newer model if its gradients are rejected."""

    @tf.function
    def step(minibatches: Any, number: Any) -> Any:
        images, labels = next(minibatches)

        def body(images: Any, labels: Any) -> tuple[Any, list[Any]]:
            with tf.GradientTape() as tape:
                loss = cross_entropy(labels, model(images, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            with tf.control_dependencies([loss]):
                seconds = tf.identity(pauses.seconds(coordinator.get_current_worker_index(), number))
            return loss, paused(gradients, seconds)

        return rule.run(body, images, labels)

    return step


def _pushes(model: keras.Model, rule: UpdateRule, pushes: int) -> Any:
    """Returns a step that pulls once and pushes the gradients of `pushes` minibatches, without repeats."""

    @tf.function
    def step(minibatches: Any, _: Any) -> None:
        with rule.pull() as version:
            for _number in tf.range(pushes):
                images, labels = next(minibatches)
                with tf.GradientTape() as tape:
                    loss = cross_entropy(labels, model(images, training=True))
                rule.push(tape.gradient(loss, model.trainable_variables), version)

    return step
