"""A client whose worker has a GPU: checks what it takes of its memory, and that models learn as without one.

Its environment says which GPU that is, and that TensorFlow takes its memory only as it needs it.
"""

import subprocess
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster

BYTES = 1 << 30
EXAMPLES = np.random.default_rng(0).normal(size=(256, 6, 4)).astype("float32")
LABELS = EXAMPLES.sum(axis=(1, 2))[:, None] / 10


def bytes_on_gpu(process: int | None) -> int:
    """Returns how much memory a process has on all GPUs."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    return sum(int(used) << 20 for pid, used in (line.split(", ") for line in lines) if int(pid) == process)


@tf.function
def mean_of_many() -> Any:
    """Computes what takes BYTES; about 0.5."""
    return tf.reduce_mean(tf.random.uniform([BYTES // 4]))


def model_of(layer: Any) -> Any:
    """Returns a model that begins with a layer."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6, 4)), layer(), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def check_data(strategy: Any) -> None:
    """Checks elements of which some parts are computed on a GPU, and some can be on none."""

    def pairs(_: Any) -> Any:
        return tf.data.Dataset.range(8).map(lambda n: (tf.cast(n, tf.float32) * 2.0, tf.strings.as_string(n))).batch(2)

    iterator = iter(strategy.experimental_distribute_datasets_from_function(pairs))
    step = tf.function(next)
    for first in (0, 2, 4):
        numbers, words = strategy.schedule(step, args=(iterator,)).result()
        assert (numbers.tolist(), words.tolist()) == (
            [2.0 * first, 2.0 * first + 2],
            [b"%d" % first, b"%d" % (first + 1)],
        )


LAYERS = {
    "dense": lambda: keras.layers.Dense(16, activation="relu"),
    "lstm": lambda: keras.layers.LSTM(8),
    "convolution": lambda: keras.layers.Conv1D(8, 3),
}


def losses(model: Any) -> list[float]:
    """Returns the losses of three epochs."""
    return model.fit(EXAMPLES, LABELS, batch_size=64, epochs=3, shuffle=False, verbose=0).history["loss"]


def losses_by_rule(strategy: Any) -> list[float]:
    """Returns the losses of steps that pull and push."""
    with strategy.scope():
        model = model_of(LAYERS["dense"])
        rule = coordinator.updates.Asynchronous(model.optimizer, model.trainable_variables)

    @tf.function
    def step() -> Any:
        with rule.pull() as version:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(EXAMPLES) - LABELS) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
        rule.push(gradients, version)
        return loss

    return [float(strategy.schedule(step).result()) for _ in range(20)]


def assert_mean(*means: Any) -> None:
    np.testing.assert_allclose(means, 0.5, atol=0.01)


def main() -> None:
    with tf.device("/device:CPU:0"):
        alone = {name: losses(model_of(layer)) for name, layer in LAYERS.items()}
    with LocalCluster(workers=1, ps=1) as cluster:
        strategy = coordinator.ParameterServerStrategy(cluster.resolver)
        assert strategy.num_replicas_in_sync == 1
        assert_mean(strategy.schedule(mean_of_many).result(), *strategy.schedule(mean_of_many, steps=5).result())
        assert bytes_on_gpu(cluster.pid("worker", 0)) >= BYTES
        assert bytes_on_gpu(cluster.pid("ps", 0)) == 0
        check_data(strategy)
        for name, layer in LAYERS.items():
            with strategy.scope():
                model = model_of(layer)
            np.testing.assert_allclose(losses(model), alone[name], rtol=1e-3, err_msg=name)
        by_rule = losses_by_rule(strategy)
        assert by_rule[-1] < by_rule[0] / 2
        left = strategy.schedule(mean_of_many, fetch=False)
        next_step = tf.function(lambda value: value + 1.0)
        assert_mean(strategy.schedule(next_step, args=(left,)).result() - 1.0)
        cluster.kill("worker", 0)
        cluster.restart("worker", 0)
        assert_mean(strategy.schedule(mean_of_many).result())
        strategy.close()


if __name__ == "__main__":
    main()
