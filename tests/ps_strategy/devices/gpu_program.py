"""A client whose workers have a GPU: prints what they took of its memory, and what models learn there and without one.

Its environment says which GPU that is, and that TensorFlow takes its memory only as it needs it.
"""

import json
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import coordinator
from coordinator.embeddings import Embedding, Table
from coordinator.testing import LocalCluster

BYTES = 1 << 30
EXAMPLES = np.random.default_rng(0).normal(size=(256, 6, 4)).astype("float32")
LABELS = EXAMPLES.sum(axis=(1, 2))[:, None] / 10
KEYS = np.arange(768).reshape(256, 3) % 40


def bytes_on_gpu(process: int | None) -> int:
    """Returns how much memory a process has on all GPUs."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    return sum(int(used) << 20 for pid, used in (line.split(", ") for line in lines) if int(pid) == process)


@tf.function
def mean_of_many() -> Any:
    """Computes what takes BYTES; about 0.5."""
    return tf.reduce_mean(tf.random.uniform([BYTES // 4]))


@tf.function
def of_the_host(words: Any) -> Any:
    """Computes what no GPU can."""
    lengths = tf.strings.length(tf.strings.split(words))
    return tf.strings.upper(words), lengths.to_tensor(), tf.strings.as_string(tf.range(3))


def model_of(layer: Any) -> Any:
    """Returns a model that begins with a layer."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6, 4)), layer(), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def elements(strategy: Any) -> list[Any]:
    """Returns elements of datasets of which some parts are computed, and of which a part can be on no GPU."""
    datasets = strategy.experimental_distribute_datasets_from_function(
        lambda _: (
            tf.data.Dataset.range(8).map(lambda n: (tf.cast(n, tf.float32) * 2.0, tf.strings.as_string(n))).batch(2)
        )
    )
    iterator = iter(datasets)

    @tf.function
    def step(elements: Any) -> Any:
        numbers, words = next(elements)
        return tf.reduce_sum(numbers), words

    return [
        (float(total), words.tolist())
        for total, words in (strategy.schedule(step, args=(iterator,)).result() for _ in range(3))
    ]


LAYERS = {
    "dense": lambda: keras.layers.Dense(16, activation="relu"),
    "lstm": lambda: keras.layers.LSTM(8),
    "gru": lambda: keras.layers.GRU(8),
    "convolution": lambda: keras.layers.Conv1D(8, 3),
}


def losses(model: Any, inputs: Any = EXAMPLES) -> list[float]:
    """Returns the losses of three epochs."""
    return model.fit(inputs, LABELS, batch_size=64, epochs=3, shuffle=False, verbose=0).history["loss"]


def losses_by_rule(strategy: Any, **options: Any) -> list[float]:
    """Returns the losses of steps that pull and push."""
    with strategy.scope():
        model = model_of(LAYERS["dense"])
        rule = coordinator.updates.Asynchronous(model.optimizer, model.trainable_variables, **options)

    @tf.function
    def step() -> Any:
        with rule.pull() as version:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(EXAMPLES) - LABELS) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
        rule.push(gradients, version)
        return loss

    return [float(strategy.schedule(step).result()) for _ in range(20)]


def losses_of_table(strategy: Any) -> tuple[list[float], int]:
    """Returns the losses of a model with an embedding table, and the number of the table's rows."""
    with strategy.scope():
        table = Table("keys", 8, 100, keras.optimizers.Adam(0.01))
        layers = [Embedding(table), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,), dtype="int64"), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    return losses(model, KEYS), table.size()


def main() -> None:
    """Prints the findings as JSON, in the last line."""
    found: dict[str, Any] = {"alone": {}, "fit": {}}
    for name, layer in LAYERS.items():
        with tf.device("/device:CPU:0"):
            found["alone"][name] = losses(model_of(layer))
    with LocalCluster(workers=1, ps=1) as cluster:
        strategy = coordinator.ParameterServerStrategy(cluster.resolver)
        found["replicas"] = strategy.num_replicas_in_sync
        found["mean"] = float(strategy.schedule(mean_of_many).result())
        found["steps"] = strategy.schedule(mean_of_many, steps=5).result().tolist()
        found["bytes"] = {job: bytes_on_gpu(cluster.pid(job, 0)) for job in ("worker", "ps")}
        found["data"] = elements(strategy)
        found["words"] = [part.tolist() for part in strategy.schedule(of_the_host, args=(["a bc", "d"],)).result()]
        for name, layer in LAYERS.items():
            with strategy.scope():
                model = model_of(layer)
            found["fit"][name] = losses(model)
        found["rule"] = losses_by_rule(strategy)
        found["rounded"] = losses_by_rule(strategy, transfer_dtype=tf.bfloat16)
        found["table"], found["rows"] = losses_of_table(strategy)
        left = strategy.schedule(mean_of_many, fetch=False)
        found["left"] = float(strategy.schedule(tf.function(lambda value: value + 1.0), args=(left,)).result())
        cluster.kill("worker", 0)
        cluster.restart("worker", 0)
        found["after a restart"] = float(strategy.schedule(mean_of_many).result())
        strategy.close()
    sys.stdout.write(json.dumps({key: _decoded(value) for key, value in found.items()}) + "\n")


def _decoded(value: Any) -> Any:
    """Returns a value whose bytes are strings."""
    if isinstance(value, list | tuple):
        return [*map(_decoded, value)]
    return value.decode() if isinstance(value, bytes) else value


if __name__ == "__main__":
    main()
