"""What the scenarios of these tests have in common: models, data, what one device makes of them, and a client.

What is called "difference" is the largest one between the weights of a model and those that the same batches give it on
one device.
"""

import functools
import json
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster

EXAMPLES, BATCH, STEPS = 64, 16, 8
TOLERANCE = 1e-5
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(EXAMPLES, 5)).astype(np.float32)
Y = RANDOM.integers(0, 3, EXAMPLES)
KEYS = RANDOM.integers(0, 7, (EXAMPLES, 2))
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


def dense_model() -> keras.Model:
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])


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
    """What one device makes of a model in two epochs: the weights before and afterwards, and the history of `fit`."""

    def __init__(self, optimizer: Callable[[], Any]) -> None:
        keras.utils.set_random_seed(1)
        model = dense_model()
        model.compile(optimizer(), loss(), metrics=["accuracy"])
        self.initial = model.get_weights()
        self.history = model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
        self.weights = model.get_weights()

    def difference(self, model: keras.Model) -> float:
        return max(float(np.abs(a - b).max()) for a, b in zip(model.get_weights(), self.weights, strict=True))


@functools.cache
def one_device(name: str) -> OneDevice:
    """Returns what one device makes of a model; called first before the client connects, which takes variables away."""
    return OneDevice(OPTIMIZERS.get(name, adam))


class Client:
    """A client of workers with two devices each; a subclass has methods that check something."""

    def __init__(self, strategy: Any, cluster: LocalCluster) -> None:
        self.strategy = strategy
        self.cluster = cluster

    def results(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns what a scheduled function returns, with a list of the values of all replicas for each value."""
        found = self.strategy.schedule(tf.function(function, autograph=False), args).result()
        return tf.nest.map_structure(
            lambda each: [np.asarray(part).tolist() for part in self.strategy.experimental_local_results(each)], found
        )

    def assert_refused(self, words: str, function: Callable[[], Any]) -> None:
        """Asserts that a scheduled function fails with an error of these words."""
        with pytest.raises(Exception, match=re.escape(words)):
            self.strategy.schedule(tf.function(function, autograph=False)).result()


def check(kind: type[Client]) -> None:
    """Prints, as JSON, the traceback of each method of `kind` that the arguments name after the number of workers."""
    workers, *names = sys.argv[1:]
    fits = any(name.startswith("fit_") for name in names)
    for model in ("dense", *(OPTIMIZERS if fits else ())):
        one_device(model)
    options = coordinator.Options(reconnect_interval=0.1, heartbeat_interval=0.2)
    found = dict.fromkeys(names, "")
    with (
        LocalCluster(workers=int(workers), ps=1, devices_per_worker=2) as cluster,
        coordinator.ParameterServerStrategy(cluster.resolver, options=options) as strategy,
    ):
        for name in names:
            try:
                getattr(kind(strategy, cluster), name)()
            except Exception:  # noqa: BLE001 - the test of this scenario fails with it
                found[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(found))
