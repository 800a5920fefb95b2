"""Runs the blocks of a page that are fragments of programs, with the names that they take for granted.

A program for `coordinator run`; its arguments are files, one for each block.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import coordinator

PAGE = Path(sys.argv[1]).parent.name
SIZE = 1024

x, y = np.ones((SIZE, 4), np.float32), np.ones((SIZE, 1), np.float32)
source = coordinator.data.arrays(x, y)


def build_model() -> Any:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


def train(strategy: Any = None, model: Any = None) -> None:
    (model or page["model"]).fit(source, batch_size=256, verbose=0)


def batches(context: Any = None) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(256)


@tf.function
def first(taken: Any) -> Any:
    return next(taken)


def names_of(strategy: Any) -> dict[str, Any]:
    """Returns what a program has created before the fragment begins."""
    with strategy.scope():
        model = build_model()
    optimizer = model.optimizer
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    distributed = strategy.experimental_distribute_datasets_from_function(batches)

    @tf.function
    def step(taken: Any) -> tf.Tensor:
        inputs, labels = source.read(taken) if isinstance(taken, tf.Tensor) else next(taken)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs) - labels) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return {
        "strategy": strategy,
        "model": model,
        "optimizer": optimizer,
        "checkpoint": checkpoint,
        "manager": tf.train.CheckpointManager(checkpoint, directory, max_to_keep=3),
        "step": step,
        "iterator": iter(strategy.experimental_distribute_dataset(batches().repeat())),
        "dataset": {"guarantees": distributed, "data": list(zip(x, y, strict=True))}.get(PAGE, batches()),
        "epochs": coordinator.data.Epochs(source, batch_size=256),
    }


resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
directory = tempfile.mkdtemp()
page: dict[str, Any] = {**globals(), "dataset_fn": batches, "folder": directory, "best_dir": directory, "os": os}
if PAGE == "data_service":
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    page["target"] = dispatcher.target
    data_worker = service.WorkerServer(service.WorkerConfig(dispatcher.target.partition("://")[2]))
if PAGE == "dispatch":
    with tf.io.TFRecordWriter(f"{directory}/records") as writer:
        for _ in range(SIZE):
            writer.write(b"record")
    page |= {"paths": [f"{directory}/records"], "count": SIZE, "parse": tf.strings.length}

for path in map(Path, sys.argv[1:]):
    text = path.read_text(encoding="utf-8")
    if "ParameterServerStrategy(" in text:
        if "strategy" in page:
            page.pop("strategy").close()
    elif "model" not in page:
        page |= names_of(page.get("strategy") or coordinator.ParameterServerStrategy(resolver))
    exec(compile(text, path, "exec"), page)  # noqa: S102 - it is what a reader runs
    if "with coordinator.ParameterServerStrategy(" in text:
        # It is closed; the next block has a new one.
        page.pop("strategy").close()
        page.pop("model", None)
if (strategy := page.get("strategy")) is not None:
    if page["dataset_fn"] is not batches:
        taken = iter(strategy.experimental_distribute_datasets_from_function(page["dataset_fn"]))
        strategy.schedule(first, args=(taken,)).result(timeout=120)
    strategy.close()
print(f"ran {len(sys.argv) - 1} blocks")  # noqa: T201 - it is a program
