"""Tests that nothing of a model that is gone stays on the servers: its variables, slots and local copies.

A program that trains many models, as tuners and notebooks do, would fill them.
"""

import gc
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator import ParameterServerStrategy, updates
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import on_every_worker

X, Y = np.ones([16, 4], "float32"), np.ones([16, 1], "float32")
EAGER = type(tf.constant(0))


def count_resources() -> int:
    """Returns how many handles of resources on servers are alive."""
    # Graphs need several collections: each frees what TensorFlow's C++ code refers to.
    for _ in range(4):
        gc.collect()
    handles = [each for each in gc.get_objects() if type(each) is EAGER and each.dtype == tf.resource]
    return sum(tf.DeviceSpec.from_string(handle.device).job in ("ps", "worker") for handle in handles)


def fit(strategy: ParameterServerStrategy) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, "silu"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(X, Y, batch_size=4, verbose=0)
    strategy.evaluate(model, (X, Y))
    model.predict(X, verbose=0)


class Trainer(tf.Module):
    """Refers to its step, whose trace refers to its variables, whose initial values refer to it."""

    def __init__(self) -> None:
        self.weights = tf.Variable(lambda: tf.zeros(self.size))
        self.seen = tf.Variable(lambda: tf.zeros(self.size), per_worker_variable=True)
        self.step = tf.function(self._step)

    size = 4

    def _step(self) -> None:
        @tf.custom_gradient
        def scaled(x: Any) -> Any:
            return x * 2.0, lambda change: change * float(self.size)

        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(scaled(self.weights))
        self.weights.assign_sub(tape.gradient(loss, self.weights))
        self.seen.assign_add(tf.ones(self.size))


def loop(strategy: ParameterServerStrategy) -> None:
    with strategy.scope():
        trainer = Trainer()
    on_every_worker(strategy, trainer.step)
    for _ in range(8):
        strategy.schedule(trainer.step)
    strategy.join()


def others(strategy: ParameterServerStrategy) -> None:
    """A function on the client that schedules, a rule with copies on the workers, and a layer with a state for each."""
    with strategy.scope():
        variable = tf.Variable(0.0)
        layer = keras.layers.GRU(2, stateful=True)
        layer.build([4, 2, 1])
        rule = updates.ModelAverage(keras.optimizers.SGD(0.1, momentum=0.9), [variable])

    @tf.function
    def step() -> None:
        with rule.pull() as version, tf.GradientTape() as tape:
            loss = variable**2
        rule.push(tape.gradient(loss, [variable]), version)

    @tf.function
    def train() -> None:
        for _ in tf.range(3):
            strategy.schedule(step)
        strategy.join()

    train()
    on_every_worker(strategy, tf.function(lambda: layer(tf.ones([4, 2, 1]))))


LONG = [pytest.param(train, marks=pytest.mark.long, id=train.__name__) for train in (fit, others)]


@pytest.mark.parametrize("train", [loop, *LONG])
def test_what_belongs_to_a_model_that_is_gone_is_freed(
    strategy: ParameterServerStrategy, train: Callable[[ParameterServerStrategy], None]
) -> None:
    # The first model also makes what stays, such as the variable by which each worker knows its index.
    train(strategy)
    before = count_resources()
    train(strategy)
    # What is being built in the background is freed when that has ended.
    wait_until(lambda: count_resources() <= before)
