"""A client of workers with two devices each, which does things on them and with one device, for a test to compare.

It takes the names of scenarios, and prints one JSON object with the observations of each. What is called "difference"
is the largest one between the weights of a model and those that the same batches give it on one device.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import coordinator
from coordinator.ps_strategy.fusing.graph_copies import packed_function
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


class OneDevice:
    """What one device makes of a model in two epochs.

    Attributes:
      initial: the weights before.
      weights: those afterwards.
      history: of `fit`.
    """

    def __init__(self, make: Callable[[], keras.Model], x: Any) -> None:
        keras.utils.set_random_seed(1)
        model = make()
        model.compile(adam(), loss(), metrics=["accuracy"])
        self.initial = model.get_weights()
        arguments = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
        self.history = model.fit(x, Y, **arguments).history
        self.weights = model.get_weights()

    def difference(self, model: keras.Model) -> float:
        return max(float(np.abs(a - b).max()) for a, b in zip(model.get_weights(), self.weights, strict=True))


class Devices:
    """Scenarios on a strategy."""

    def __init__(self, strategy: Any, cluster: LocalCluster, one_device: Mapping[str, OneDevice]) -> None:
        self.strategy = strategy
        self.cluster = cluster
        self.one_device = one_device

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

    def combining(self) -> Any:
        """`run`, `reduce`, `gather` and what replicas tell each other."""
        strategy = self.strategy

        def replica() -> Any:
            context = tf.distribute.get_replica_context()
            number = tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0
            rows = tf.IndexedSlices(number[tf.newaxis, tf.newaxis], context.replica_id_in_sync_group[tf.newaxis], [2, 1])
            summed = context.all_reduce(SUM, {"number": number, "rows": rows})
            return number, summed["number"], tf.convert_to_tensor(summed["rows"]), context.all_gather(number[None], 0)

        def combined() -> Any:
            values = strategy.run(lambda: tf.fill([2], 1.0 + tf.cast(_replica(), tf.float32)))
            return strategy.reduce(SUM, values, axis=0), strategy.reduce(MEAN, values, axis=0), strategy.gather(values, 0)

        number, summed, rows, gathered = self.results(lambda: strategy.run(replica))
        return {
            "replicas": strategy.num_replicas_in_sync,
            "number": number,
            "summed": summed,
            "rows": rows,
            "gathered": gathered,
            "combined": self.results(combined),
            "same for all": self.refusal(lambda: strategy.reduce(SUM, tf.constant(1.0))),
        }

    def aggregating(self) -> Any:
        """What replicas change."""
        kinds = tf.VariableAggregation
        with self.strategy.scope():
            total, first = (tf.Variable(1.0, aggregation=kind) for kind in (kinds.SUM, kinds.ONLY_FIRST_REPLICA))
            mean = tf.Variable([1.0, 1.0], aggregation=kinds.MEAN)
            none = tf.Variable(0.0)
            state = keras.random.SeedGenerator(7)
            metric = keras.metrics.Mean()

        def replica() -> Any:
            number = tf.cast(_replica(), tf.float32) + 1.0
            total.assign_add(number)
            total.assign(total - number * 10.0)
            first.assign(number * 3.0)
            mean.assign_sub([number, 0.0])
            metric.update_state(number)
            return total.read_value(), state.next()

        reads, seeds = self.results(lambda: self.strategy.run(replica))
        changed = [each.numpy().tolist() for each in (total, first, mean)]
        return {
            "changed": changed,
            "read": reads,
            "seeds": seeds,
            "metric": [metric.result().numpy().item(), metric.count.numpy().item()],
            "refused": self.refusal(lambda: self.strategy.run(lambda: none.assign_add(1.0))),
            "refused rows": self.refusal(lambda: self.strategy.run(lambda: mean.scatter_update(_row()))),
            "refused metric": self.refusal(lambda: self.strategy.run(lambda: metric.total.assign(5.0))),
        }

    def datasets(self) -> Any:
        """The elements that replicas get."""
        strategy, seen = self.strategy, []

        def of_function(context: tf.distribute.InputContext) -> tf.data.Dataset:
            seen.extend([context.num_replicas_in_sync, context.get_per_replica_batch_size(6)])
            return tf.data.Dataset.range(8).batch(3).map(lambda each: {"x": each})

        options = tf.distribute.InputOptions(
            experimental_per_replica_buffer_size=2, experimental_fetch_to_device=False
        )
        per_worker = strategy.experimental_distribute_datasets_from_function(of_function, options)
        whole = strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(3))
        values = strategy.experimental_distribute_values_from_function(lambda each: each.replica_id_in_sync_group * 5)
        found = {}
        for name, dataset, count in (("function", per_worker, 2), ("dataset", whole, 3)):
            iterator = iter(dataset)
            found[name] = [self.results(lambda each: next(each), iterator) for _ in range(count)]
        return {"context": seen, "values": list(strategy.experimental_local_results(values)), **found}

    def loop(self) -> Any:
        """A custom loop, whose replicas apply the optimizer."""
        return self._loop(None)

    def _loop(self, rule_class: Any) -> Any:
        strategy, one = self.strategy, self.one_device["dense"]
        with strategy.scope():
            model = dense_model()
            model.set_weights(one.initial)
            optimizer, metric = adam(), keras.metrics.Mean()
            if rule_class is None:
                optimizer.build(model.trainable_variables)
            else:
                rule = rule_class(optimizer, model.trainable_variables)
        loss_of = loss()

        def data(context: tf.distribute.InputContext) -> tf.data.Dataset:
            size = context.get_per_replica_batch_size(BATCH)
            return tf.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(size, drop_remainder=True)

        def replica(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                value = loss_of(y, model(x))
            gradients = tape.gradient(value, model.trainable_variables)
            metric.update_state(value * strategy.num_replicas_in_sync)
            if rule_class is None:
                optimizer.apply(gradients, model.trainable_variables)
            return value, gradients

        def step(iterator: Any) -> Any:
            if rule_class is None:
                value, _ = strategy.run(replica, args=next(iterator))
            else:
                with rule.pull() as version:
                    value, gradients = strategy.run(replica, args=next(iterator))
                rule.push([strategy.reduce(SUM, each) for each in gradients], version)
            return strategy.reduce(SUM, value)

        iterator = iter(strategy.experimental_distribute_datasets_from_function(data))
        function = tf.function(step)
        for _ in range(STEPS):
            strategy.schedule(function, args=(iterator,))
        strategy.join()
        if rule_class is not None:
            rule.settle()
        concrete = self.concrete(function, iterator)
        return {
            "difference": one.difference(model),
            "updates": int(optimizer.iterations.numpy()),
            "batches": metric.count.numpy().item(),
            "reads": _reads_of(concrete, model.trainable_variables),
            "pushes": _count_changes(concrete, model.trainable_variables),
            "devices": _devices_of(concrete, "MatMul"),
        }

    def refused_calls(self) -> Any:
        """What each replica would do, and is done once for all of them."""
        with self.strategy.scope():
            variable = tf.Variable([1.0])
            rule = coordinator.updates.Asynchronous(keras.optimizers.SGD(0.1), [variable])

        def pull() -> Any:
            with rule.pull() as version:
                return version

        def pull_in_replica() -> Any:
            return self.strategy.run(pull)

        def push_in_replica() -> Any:
            return self.strategy.run(lambda: rule.push([tf.constant([1.0])], tf.constant(0, tf.int64)))

        def update_with_parts() -> Any:
            def replica() -> Any:
                number = tf.cast(_replica(), tf.float32)[None]

                def merged(strategy: Any, values: Any) -> Any:
                    return strategy.extended.update(variable, lambda each, value: each.assign(value), args=(values,))

                return tf.distribute.get_replica_context().merge_call(merged, args=(number,))

            return self.strategy.run(replica)

        try:
            self.strategy.run(lambda: 0)
            eager = "none"
        except RuntimeError as error:
            eager = str(error)
        return {
            "pull": self.refusal(pull_in_replica),
            "push": self.refusal(push_in_replica),
            "update": self.refusal(update_with_parts),
            "eager": eager,
        }

    def rules(self) -> Any:
        """A custom loop with update rules."""
        updates = coordinator.updates
        kinds = {"Asynchronous": updates.Asynchronous, "ModelAverage": updates.ModelAverage}
        kinds["Synchronous"] = lambda *given: updates.Synchronous(*given, grads_to_wait=1)
        return {name: self._loop(kind) for name, kind in kinds.items()}

    def recurrent(self) -> Any:
        """`fit` of a recurrent model, whose loops read variables."""
        one = self.one_device["recurrent"]
        with self.strategy.scope():
            model = recurrent_model()
            model.set_weights(one.initial)
            model.compile(adam(), loss())
        model.fit(SERIES, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)

        def predict(x: Any) -> Any:
            parts = tf.split(x, 2)
            values = self.strategy.experimental_distribute_values_from_function(
                lambda context: parts[context.replica_id_in_sync_group]
            )
            return self.strategy.gather(self.strategy.run(model, args=(values,)), 0)

        concrete = self.concrete(tf.function(predict), tf.TensorSpec([BATCH, 4, 5]))
        packed = packed_function(concrete)
        return {"difference": one.difference(model), "reads": _reads_of(packed, model.trainable_variables)}

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
        one = self.one_device["dense"]
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
        """A table's rows, looked up on each device and changed once."""
        with self.strategy.scope():
            table = coordinator.embeddings.Table("rows", 4, 100, adam(), initializer=_rows_of_keys)
            embedding = coordinator.embeddings.Embedding(table)
            layers = [embedding, keras.layers.Flatten(), keras.layers.Dense(3, kernel_initializer="ones")]
            model = keras.Sequential([keras.Input((2,), dtype="int64"), *layers])
            model.compile(adam(), loss())
        history = model.fit(KEYS, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
        return {"loss": history["loss"], "steps": table.statistics().steps, "size": table.statistics().size}

    def failures(self) -> Any:
        """A worker is restarted, one with another number of devices is added, a parameter server is lost."""
        strategy, cluster = self.strategy, self.cluster
        with strategy.scope():
            count = tf.Variable(0, aggregation=tf.VariableAggregation.SUM)
        checkpoint = tf.train.Checkpoint(count=count)
        manager = tf.train.CheckpointManager(checkpoint, sys.argv[1], max_to_keep=1)
        strategy.restore_from(manager)

        def replica() -> Any:
            count.assign_add(1)
            return _replica() + 1

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


def _replica() -> Any:
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def _row() -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant([1.0]), tf.constant([0]))


def _rows_of_keys(keys: Any, dim: int) -> Any:
    return tf.ones([tf.size(keys), dim]) * tf.cast(keys, tf.float32)[:, None] * 0.1


def _synchronous(*given: Any) -> Any:
    return coordinator.updates.Synchronous(*given, grads_to_wait=1)


def _nodes(concrete: Any) -> list[tuple[Any, Sequence[Any]]]:
    """Returns all operations of a function and of those that it calls, each with the operations beside it."""
    definition = concrete.graph.as_graph_def()
    groups = [definition.node, *(function.node_def for function in definition.library.function)]
    return [(node, group) for group in groups for node in group]


def _reads_of(concrete: Any, variables: Sequence[Any]) -> dict[str, int]:
    """Returns how many operations read variables, in the function itself and in those that it calls."""
    mine = {each.name for each in concrete.graph.get_operations() if each.type == "ReadVariableOp"}
    handles = {id(variable.value.handle) for variable in variables}
    captured = {inside.op.name for outside, inside in _captures(concrete) if id(outside) in handles}
    reads = [node for node, _ in _nodes(concrete) if node.op == "ReadVariableOp"]
    return {
        "variables": len(variables),
        "in the function": sum(node.name in mine and node.input[0] in captured for node in reads),
        "in loops and calls": sum(node.name not in mine for node in reads),
    }


def _captures(concrete: Any) -> list[tuple[Any, Any]]:
    captured = concrete.captured_inputs
    return list(zip(captured, concrete.inputs[len(concrete.inputs) - len(captured) :], strict=True))


def _count_changes(concrete: Any, variables: Sequence[Any]) -> int:
    handles = {id(variable.value.handle) for variable in variables}
    captured = {inside.op.name for outside, inside in _captures(concrete) if id(outside) in handles}
    changes = ("AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp", "ResourceApplyAdam")
    return sum(node.op in changes and node.input[0] in captured for node, _ in _nodes(concrete))


def _devices_of(concrete: Any, operation: str) -> list[str]:
    return sorted({node.device for node, _ in _nodes(concrete) if node.op == operation})


def main(folder: str, *scenarios: str) -> None:
    del folder
    wanted = {"dense": (dense_model, X)}
    if "recurrent" in scenarios:
        wanted["recurrent"] = (recurrent_model, SERIES)
    one_device = {name: OneDevice(*made) for name, made in wanted.items()}
    options = coordinator.Options(reconnect_interval=0.1, heartbeat_interval=0.2)
    with LocalCluster(workers=1, ps=1, devices_per_worker=2) as cluster:
        strategy = coordinator.ParameterServerStrategy(cluster.resolver, options=options)
        with strategy:
            devices = Devices(strategy, cluster, one_device)
            found = {name: getattr(devices, name.replace(" ", "_"))() for name in scenarios}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
