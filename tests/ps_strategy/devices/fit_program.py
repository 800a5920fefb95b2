"""A client that fits models on workers with two devices, some of which are lost; see `client.py`."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import coordinator
from tests.ps_strategy.devices.client import (
    BATCH,
    EXAMPLES,
    KEYS,
    OPTIMIZERS,
    SUM,
    Client,
    OwnStep,
    X,
    Y,
    adam,
    dense_model,
    loss,
    one_device,
    replica_number,
    write_observations,
)


class Fits(Client):
    """Scenarios of `fit`, and of failures."""

    def fits(self) -> Any:
        """`fit` with each kind of data, and by rules."""
        found = {}
        for name, (data, compiled, fitted) in self._fits().items():
            found[name] = self._fit(data, compiled, fitted)
        return found

    def _fits(self) -> Mapping[str, Any]:
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
        per_worker = self.strategy.experimental_distribute_dataset(dataset)

        def of_function(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return tf.data.Dataset.from_tensor_slices((X, Y)).batch(context.get_per_replica_batch_size(BATCH))

        def endless(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return of_function(context).repeat()

        updates = coordinator.updates
        arrays = {"x": X, "y": Y, "batch_size": BATCH, "shuffle": False}
        source = {"x": coordinator.data.arrays(X, Y), "batch_size": BATCH, "shuffle": False}
        return {
            "arrays": (arrays, {}, {}),
            "several steps in a call": (arrays, {"steps_per_execution": 2}, {}),
            "a dataset": ({"x": dataset}, {}, {"validation_data": dataset}),
            "a per-worker dataset": ({"x": per_worker}, {}, {"validation_data": per_worker}),
            "a dataset function": ({"x": of_function}, {}, {"validation_data": of_function}),
            "endless data": ({"x": endless}, {"steps_per_execution": 2}, {"steps_per_epoch": 4}),
            "a source": (source, {}, {"validation_data": coordinator.data.arrays(X, Y)}),
            "an asynchronous rule": (arrays, {"rule": updates.Asynchronous}, {}),
            "a synchronous rule": (arrays, {"rule": _synchronous}, {}),
        }

    def _fit(self, data: Any, compiled: dict[str, Any], fitted: Any) -> Any:
        one = one_device("dense")
        rule = compiled.pop("rule", None)
        with self.strategy.scope():
            model = dense_model()
            model.set_weights(one.initial)
            optimizer: Any = adam()
            if rule is not None:
                optimizer = rule(optimizer, model.trainable_variables)
            model.compile(optimizer, loss(), metrics=["accuracy"], **compiled)
        history = model.fit(**data, epochs=2, verbose=0, **fitted).history
        evaluated = model.evaluate(X, Y, verbose=0)
        shown = [history["loss"], history["accuracy"]]
        expected = [one.history["loss"], one.history["accuracy"]]
        return {
            "difference": one.difference(model),
            "difference of logs": float(np.abs(np.array(shown) - expected).max()),
            "difference of validation": abs(history.get("val_loss", evaluated[:1])[-1] - evaluated[0]),
            "updates": int(model.optimizer.iterations.numpy()),
        }

    def optimizers(self) -> Any:
        """`fit` with optimizers that have more than slots; returns the differences."""
        found = {}
        for name, optimizer in OPTIMIZERS.items():
            with self.strategy.scope():
                model = dense_model()
                model.set_weights(one_device(name).initial)
                model.compile(optimizer(), loss())
            model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
            found[name] = one_device(name).difference(model)
        return found

    def own_steps(self) -> Any:
        """Models with a step of their own, with layers that change variables, and what is refused."""
        arguments = {"batch_size": 15, "epochs": 1, "shuffle": False, "verbose": 0}
        with self.strategy.scope():
            own = OwnStep()
            own.compile(adam(), loss())
            layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
            normalized = keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(3)])
            normalized.compile(adam(), loss())
            accumulating = dense_model()
            accumulating.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), loss())
        logs = own.fit(X, Y, **arguments).history
        normalized.fit(X, Y, **arguments)
        seed = next(each for each in normalized.non_trainable_variables if "seed" in each.path)
        moving = [each for each in normalized.non_trainable_variables if "moving" in each.path]
        try:
            accumulating.fit(X, Y, **arguments)
            refusal = "none"
        except ValueError as error:
            refusal = str(error)
        return {
            "own step": float(logs["own"][0]),
            "predictions": list(own.predict(X[:5], verbose=0).shape),
            "seeds drawn": int(seed.numpy()[1]),
            "moving averages are finite": bool(all(np.isfinite(each.numpy()).all() for each in moving)),
            "accumulation": refusal,
        }

    def tables(self) -> Any:
        """A table's rows, looked up on each device and changed once; and by a loop on one device."""
        return {"on one device": self._table(self._fit_on_one_device), "on two devices": self._table(_fit_table)}

    def _table(self, fit: Callable[[Any], list[float]]) -> Any:
        with self.strategy.scope():
            table = coordinator.embeddings.Table(fit.__name__, 4, 100, adam(), initializer=_rows_of_keys)
            embedding = coordinator.embeddings.Embedding(table)
            layers = [embedding, keras.layers.Flatten(), keras.layers.Dense(3, kernel_initializer="ones")]
            model = keras.Sequential([keras.Input((2,), dtype="int64"), *layers])
            model.compile(adam(), loss())
        losses = fit(model)
        return {"loss": losses, "steps": table.statistics().steps, "size": table.statistics().size}

    def _fit_on_one_device(self, model: keras.Model) -> list[float]:
        loss_of = loss()

        def step(keys: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                # Keras divides it by the number of replicas.
                value = loss_of(y, model(keys, training=True)) * self.strategy.num_replicas_in_sync
            model.optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
            return value

        function = tf.function(step)
        batches = [slice(first, first + BATCH) for _ in range(2) for first in range(0, EXAMPLES, BATCH)]
        losses = [float(self.strategy.schedule(function, args=(KEYS[each], Y[each])).result()) for each in batches]
        half = len(losses) // 2
        return [float(np.mean(losses[:half])), float(np.mean(losses[half:]))]

    def failures(self) -> Any:
        """A worker is restarted, one with another number of devices is added, a parameter server is lost."""
        strategy, cluster = self.strategy, self.cluster
        with strategy.scope():
            count = tf.Variable(0, aggregation=tf.VariableAggregation.SUM)
        checkpoint = tf.train.Checkpoint(count=count)
        manager = tf.train.CheckpointManager(checkpoint, self.folder, max_to_keep=1)
        strategy.restore_from(manager)

        def replica() -> Any:
            count.assign_add(1)
            return replica_number() + 1

        function = tf.function(lambda: strategy.reduce(SUM, strategy.run(replica)))

        def steps() -> list[int]:
            return [int(each.result()) for each in [strategy.schedule(function) for _ in range(20)]]

        before = steps()
        manager.save()
        cluster.restart("worker", 0)
        restarted = steps()
        strategy.cluster.add_worker(cluster.start_worker(devices=1))
        cluster.restart("ps", 0)
        recovered = steps()
        return {"results": [before, restarted, recovered], "count": int(count.numpy())}


def _rows_of_keys(keys: Any, dim: int) -> Any:
    return tf.ones([tf.size(keys), dim]) * tf.cast(keys, tf.float32)[:, None] * 0.1


def _fit_table(model: keras.Model) -> list[float]:
    return model.fit(KEYS, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history["loss"]


def _synchronous(*given: Any) -> Any:
    return coordinator.updates.Synchronous(*given, grads_to_wait=1)


if __name__ == "__main__":
    write_observations(Fits)
