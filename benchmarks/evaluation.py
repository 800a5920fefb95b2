"""The evaluation of 20,000 examples: how long it takes, and whether each counts once although workers die.

    python -m benchmarks.evaluation [--repeats 7] [--kills 50] [--examples 20000]

A small network with loss, AUC, accuracy and a count of examples, in batches of 50, on two workers and a parameter
server. The ways take turns after a round that is not counted; the figures are medians. `batch by batch` is
`model.evaluate` of a model whose `test_step` changes a variable, which shards do not allow; it takes time itself.
Then a worker is killed and restarted at a random moment of each of `--kills` evaluations, whose results are compared
with those of one process.
"""

import argparse
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import coordinator
from benchmarks.alternated import alternated
from benchmarks.rounds import ratio
from coordinator.simulation.result import aligned
from coordinator.testing import LocalCluster

BATCH, WORKERS = 50, 2
LATEST_KILL = 0.4


class Seen(keras.metrics.Metric):
    """Counts examples."""

    def __init__(self) -> None:
        super().__init__(name="seen")
        self.count = self.add_weight(name="count", initializer="zeros", dtype="int64")

    def update_state(self, y: Any, *_: Any, **__: Any) -> None:
        """Adds those of a batch."""
        self.count.assign_add(tf.shape(y, tf.int64)[0])

    def result(self) -> Any:
        """Returns their number."""
        return tf.identity(self.count)


class Counted(keras.Sequential):
    """Changes a variable in each step, so that it is evaluated batch by batch."""

    def test_step(self, data: Any) -> Any:
        """Evaluates a batch."""
        self.optimizer.iterations.assign_add(1)
        return super().test_step(data)


def new_model(kind: type[keras.Sequential] = keras.Sequential) -> keras.Model:
    """Returns a model with the same weights each time."""
    keras.utils.set_random_seed(1)
    layers = [keras.Input((8,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1, "sigmoid")]
    model = kind(layers)
    model.compile("sgd", "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc"), "accuracy", Seen()])
    return model


def timed(evaluate: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    """Returns a round of a way to evaluate."""

    def run() -> dict[str, Any]:
        began = time.monotonic()
        evaluate()
        return {"figures": {"s": time.monotonic() - began}}

    return run


def killed(cluster: LocalCluster, strategy: Any, ways: Sequence[Callable[[], Any]], kills: int, truth: Any) -> str:
    """Evaluates while workers die, and returns how often that was exact."""
    exact = hits = 0
    chance = random.Random(1)
    for number in range(kills):
        worker, before = chance.randrange(WORKERS), strategy.cluster.statistics().retried
        killing = threading.Timer(chance.uniform(0, LATEST_KILL), cluster.restart, ("worker", worker))
        killing.start()
        found = ways[number % len(ways)]()
        killing.join()
        hits += strategy.cluster.statistics().retried > before
        exact += found["seen"] == truth["seen"] and all(abs(found[name] - truth[name]) < 1e-6 for name in truth)
    return f"{kills} evaluations with a killed worker, {hits} of them in the middle of a shard: {exact} exact"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser("benchmarks.evaluation", description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--examples", type=int, default=20_000)
    chosen = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(chosen.examples, 8)).astype(np.float32)
    y = (x.sum(1, keepdims=True) + rng.normal(size=(chosen.examples, 1)) > 0).astype(np.float32)
    truth = new_model().evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    with (
        LocalCluster(workers=WORKERS, ps=1) as cluster,
        coordinator.ParameterServerStrategy(cluster.resolver) as strategy,
    ):
        with strategy.scope():
            model, counted = new_model(), new_model(Counted)
        source, data = coordinator.data.arrays(x, y), tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
        ways: dict[str, Callable[[], Any]] = {
            "strategy.evaluate(source)": lambda: strategy.evaluate(model, source, batch_size=BATCH),
            "the same, snapshot": lambda: strategy.evaluate(model, source, batch_size=BATCH, model_state="snapshot"),
            "model.evaluate(dataset)": lambda: model.evaluate(data, verbose=0, return_dict=True),
            "batch by batch": lambda: counted.evaluate(data, verbose=0, return_dict=True),
        }
        found = alternated({name: timed(way) for name, way in ways.items()}, chosen.repeats, lambda _: None)
        former = found["batch by batch"]
        rows = [(name, each.text("s", ".2f"), ratio(former, each, "s")) for name, each in found.items()]
        print(aligned(("way", "s", "batch by batch / this"), rows), flush=True)
        print(killed(cluster, strategy, [*ways.values()][:3], chosen.kills, truth))


if __name__ == "__main__":
    main()
