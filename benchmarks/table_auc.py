"""What a dynamic table is worth: the AUC of clicks of which the truth is known, against hashing keys into fewer rows.

Eight categories of which few values are frequent; each key has a hidden weight, and the chance of a click depends on
the sum of those of an example. So the best AUC is known. The models differ in their tables alone:

    dynamic     a row for each key
    admission   a row for each key from its third look-up on
    hashed      keys are hashed into 260,000 rows, so that some share one
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import coordinator
from benchmarks.contestants.criteo_like import ROWS
from coordinator.embeddings import MinCount, Normal, Table, Uniform
from coordinator.simulation.result import aligned
from coordinator.testing import LocalCluster

FIELDS, VALUES, SKEW = 8, 50_000, 3.0
BATCH, STEPS, QUICK_STEPS = 2048, 1500, 20
HELD_OUT = 100_000
_DIM, _HIDDEN = 8, 32
_WEIGHT, _BIAS = 0.5, -1.0
_MULTIPLIER = 2_654_435_761

TRUTH = "truth"
# For each model: the table's options, and the row's key of each key of the data.
MODELS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "dynamic": ({"capacity": FIELDS * VALUES}, lambda keys: keys),
    "admission": ({"capacity": FIELDS * VALUES, "admission": MinCount(3)}, lambda keys: keys),
    "hashed": ({"capacity": ROWS}, lambda keys: tf.math.floormod(keys * _MULTIPLIER, ROWS)),
}


def examples(size: int, seed: int, number: Any) -> tuple[Any, Any, Any]:
    """Returns the keys, int64 `[size, FIELDS]`, the chances of a click, and the clicks, float32 `[size]`."""
    seeds = tf.stack([tf.constant(seed, tf.int64), tf.cast(number, tf.int64)])
    uniform = tf.random.stateless_uniform([size, FIELDS], seeds, dtype=tf.float64)
    keys = tf.cast(uniform**SKEW * VALUES, tf.int64) * FIELDS + tf.range(FIELDS, dtype=tf.int64)
    hidden = tf.reshape(Normal(_WEIGHT, seed=seed + 1)(tf.reshape(keys, [-1]), 1), [size, FIELDS])
    chances = tf.sigmoid(tf.reduce_sum(hidden, axis=1) + _BIAS)
    clicks = tf.random.stateless_uniform([size], seeds + 1_000_000) < chances
    return keys, chances, tf.cast(clicks, tf.float32)


def auc(scores: np.ndarray, clicks: np.ndarray) -> float:
    """Returns the share of pairs of a click and none in which the click has the higher score."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    positive = clicks > 0
    count = int(positive.sum())
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * (len(scores) - count)))


def measure(seeds: Sequence[int], steps: int) -> dict[str, list[float]]:
    """Trains each model with each seed, one step at a time, and returns the AUC of held-out examples, by model."""
    found: dict[str, list[float]] = {name: [] for name in (TRUTH, *MODELS)}
    with LocalCluster(1, 1) as cluster, coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        for seed in seeds:
            keys, chances, clicks = examples(HELD_OUT, seed, -1)
            found[TRUTH].append(auc(chances.numpy(), clicks.numpy()))
            for name, (options, row_keys) in MODELS.items():
                logits = _trained(strategy, f"{name}_{seed}", options, row_keys, seed, steps)
                found[name].append(auc(logits(keys), clicks.numpy()))
    return found


def _trained(
    strategy: coordinator.ParameterServerStrategy,
    name: str,
    options: dict[str, Any],
    row_keys: Callable[[Any], Any],
    seed: int,
    steps: int,
) -> Callable[[Any], np.ndarray]:
    """Trains a model, and returns the function that gives its logits for keys."""
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        table = Table(name, _DIM, optimizer=keras.optimizers.Adam(0.003), initializer=Uniform(0.05, seed), **options)
        layers = [keras.Input([FIELDS * _DIM]), keras.layers.Dense(_HIDDEN, "relu"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.Adam(0.003)
        optimizer.build(model.trainable_variables)

    def scores(keys: Any, *, training: bool) -> Any:
        rows = table.lookup(row_keys(keys), training=training)
        return model(tf.reshape(rows, [-1, FIELDS * _DIM]), training=training)[:, 0]

    @tf.function
    def step(number: Any) -> None:
        keys, _, clicks = examples(BATCH, seed, number)
        with tf.GradientTape() as tape:
            logits = scores(keys, training=True)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(clicks, logits))
        gradient, *others = tape.gradient(loss, [table.variable, *model.trainable_variables])
        table.apply_gradients(gradient)
        optimizer.apply(others, model.trainable_variables)

    for number in range(steps):
        strategy.schedule(step, args=(np.int64(number),))
    strategy.join()
    evaluate = tf.function(lambda keys: scores(keys, training=False))
    return lambda keys: strategy.schedule(evaluate, args=(keys,)).result()


def table(found: dict[str, list[float]]) -> str:
    """Returns a row for each model: the mean of the seeds, and how each seed differs from `dynamic`."""
    rows = []
    for name, values in found.items():
        differences = [value - dynamic for value, dynamic in zip(values, found["dynamic"], strict=True)]
        spread = f"{statistics.mean(differences):+.4f}", f"{min(differences):+.4f} to {max(differences):+.4f}"
        rows.append((name, f"{statistics.mean(values):.4f}", *spread))
    return aligned(("AUC", "mean", "to dynamic", "of a seed"), rows)
