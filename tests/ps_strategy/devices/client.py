"""What the programs of these tests have in common: models, data, what one device makes of them, and a client.

What is called "difference" is the largest one between the weights of a model and those that the same batches give it on
one device.
"""

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster

EXAMPLES, BATCH, STEPS = 64, 16, 8
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(EXAMPLES, 5)).astype(np.float32)
SERIES = RANDOM.normal(size=(EXAMPLES, 4, 5)).astype(np.float32)
Y = RANDOM.integers(0, 3, EXAMPLES)
KEYS = RANDOM.integers(0, 7, (EXAMPLES, 2))
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


def dense_model() -> keras.Model:
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])


def recurrent_model() -> keras.Model:
    return keras.Sequential([keras.Input((4, 5)), keras.layers.LSTM(6), keras.layers.Dense(3)])


class OwnStep(keras.Model):
    """A model with a `train_step` of its own, which is built by its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers_in_order = [keras.layers.Dense(8, "relu"), keras.layers.Dense(3)]

    def call(self, inputs: Any) -> Any:
        for layer in self.layers_in_order:
            inputs = layer(inputs)
        return inputs

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        # The mean over the replicas of the sums that each has of the loss.
        return {"own": loss * tf.distribute.get_strategy().num_replicas_in_sync}


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01)


def decaying_adam() -> keras.optimizers.Optimizer:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.9)
    return keras.optimizers.AdamW(schedule, weight_decay=0.1, use_ema=True)


# They change variables of their own in a step, beside slots.
OPTIMIZERS = {"Nadam": lambda: keras.optimizers.Nadam(0.01), "AdamW": decaying_adam}


class OneDevice:
    """What one device makes of a model in two epochs.

    Attributes:
      initial: the weights before.
      weights: those afterwards.
      history: of `fit`.
    """

    def __init__(self, make: Callable[[], keras.Model], x: Any, optimizer: Callable[[], Any] = adam) -> None:
        keras.utils.set_random_seed(1)
        model = make()
        model.compile(optimizer(), loss(), metrics=["accuracy"])
        self.initial = model.get_weights()
        arguments = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
        self.history = model.fit(x, Y, **arguments).history
        self.weights = model.get_weights()

    def difference(self, model: keras.Model) -> float:
        return max(float(np.abs(a - b).max()) for a, b in zip(model.get_weights(), self.weights, strict=True))


@functools.cache
def one_device(name: str) -> OneDevice:
    """Returns what one device makes of a model; called first before the client connects, which takes variables away."""
    known = {"dense": (dense_model, X), "recurrent": (recurrent_model, SERIES)}
    return OneDevice(*known[name]) if name in known else OneDevice(dense_model, X, OPTIMIZERS[name])


class Client:
    """A client of workers with two devices each; a subclass has methods that return observations.

    Args:
      strategy: the strategy.
      cluster: the cluster.
      folder: for checkpoints.
    """

    def __init__(self, strategy: Any, cluster: LocalCluster, folder: str) -> None:
        self.strategy = strategy
        self.cluster = cluster
        self.folder = folder

    def results(self, function: Callable[..., Any], *args: Any) -> Any:
        found = self.strategy.schedule(tf.function(function, autograph=False), args).result()
        return tf.nest.map_structure(
            lambda each: [np.asarray(part).tolist() for part in self.strategy.experimental_local_results(each)], found
        )

    def concrete(self, function: Any, *args: Any) -> Any:
        with self.strategy.extended.scheduled_tracing():
            return function.get_concrete_function(*args)

    def refusal(self, function: Callable[[], Any]) -> str:
        try:
            self.strategy.schedule(tf.function(function, autograph=False)).result()
        except Exception as error:  # noqa: BLE001 - whatever it is, the test compares the message
            return f"{type(error).__name__}: {error}"
        return "none"


def replica_number() -> Any:
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def write_observations(kind: type[Client]) -> None:
    """Prints a JSON object with what the methods return that the program's arguments name.

    They come after the folder and the number of workers.
    """
    folder, workers, *names = sys.argv[1:]
    for model in ("dense", *(OPTIMIZERS if "optimizers" in names else ()), *{"recurrent"}.intersection(names)):
        one_device(model)
    options = coordinator.Options(reconnect_interval=0.1, heartbeat_interval=0.2)
    with (
        LocalCluster(workers=int(workers), ps=1, devices_per_worker=2) as cluster,
        coordinator.ParameterServerStrategy(cluster.resolver, options=options) as strategy,
    ):
        client = kind(strategy, cluster, folder)
        found = {name: getattr(client, name)() for name in names}
    sys.stdout.write(json.dumps(found))
