"""What `test_devices.py` checks on workers with two devices each, as methods.

What is called "difference" is the largest one between the weights of a model and those that the same batches give it on
one device.
"""

import contextlib
import functools
import json
import logging
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

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
    """Prints, as JSON, the traceback of each method of `kind`; the argument has their names by number of workers."""
    groups = json.loads(sys.argv[1])
    fits = any(name.startswith("fit_") for names in groups.values() for name in names)
    for model in ("dense", *(OPTIMIZERS if fits else ())):
        one_device(model)
    options = coordinator.Options(reconnect_interval=0.1, heartbeat_interval=0.2)
    found = dict.fromkeys((name for names in groups.values() for name in names), "")
    for workers, names in groups.items():
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


DEVICES = ["/device:CPU:0", "/device:CPU:1"]


def number_of_replica() -> Any:
    """Returns 1 on the first device, 2 on the second one."""
    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32) + 1.0


class Scenarios(Client):
    def each_device_is_a_replica_and_replicas_combine_their_values(self) -> None:
        strategy = self.strategy

        def replica() -> Any:
            context, number = tf.distribute.get_replica_context(), number_of_replica()
            rows = tf.IndexedSlices(number[None, None], context.replica_id_in_sync_group[tf.newaxis], [2, 1])
            summed = context.all_reduce(SUM, {"number": number, "rows": rows})
            return number, summed["number"], tf.convert_to_tensor(summed["rows"]), context.all_gather(number[None], 0)

        def combined() -> Any:
            values = strategy.run(lambda: tf.fill([2], number_of_replica()))
            sums = (strategy.reduce(kind, values, axis=0) for kind in (SUM, MEAN))
            return (*sums, strategy.gather(values, 0))

        assert strategy.num_replicas_in_sync == 2
        number, summed, rows, gathered = self.results(lambda: strategy.run(replica))
        assert (number, summed, rows, gathered) == ([1, 2], [3, 3], [[[1], [2]]] * 2, [[1, 2]] * 2)
        assert self.results(combined) == ([6], [1.5], [[1, 1, 2, 2]])
        self.assert_refused("the same for all replicas", lambda: strategy.reduce(SUM, tf.constant(1.0)))

    def a_variable_is_changed_by_what_its_aggregation_makes_of_all_replicas(self) -> None:
        kinds, run = tf.VariableAggregation, self.strategy.run
        with self.strategy.scope():
            total, first = (tf.Variable(1.0, aggregation=kind) for kind in (kinds.SUM, kinds.ONLY_FIRST_REPLICA))
            mean = tf.Variable([1.0, 1.0], aggregation=kinds.MEAN)
            none = tf.Variable(0.0)
            state = keras.random.SeedGenerator(7)
            metric = keras.metrics.Mean()
            weight = keras.Variable("ones", shape=(1,))

        def replica() -> Any:
            number = number_of_replica()
            weight.assign(tf.nn.relu(weight - 4.0 * (number - 1.0)))
            total.assign_add(number)
            total.assign(total - number * 10.0)
            first.assign(number * 3.0)
            mean.assign_sub([number, 0.0])
            metric.update_state(number)
            return total.read_value(), state.next()

        reads, seeds = self.results(lambda: run(replica))
        # 1 + (1 + 2) - (10 + 20); the first replica's 3; 1 - (1 + 2) / 2; (1 + 0) / 2.
        assert [each.numpy().tolist() for each in (total, first, mean, weight)] == [-26, 3, [-0.5, 1], [0.5]]
        assert (reads, seeds) == ([-26, -26], [[7, 0], [7, 1]])
        assert (float(metric.result()), float(metric.count)) == (1.5, 2)

        def descend() -> None:
            with tf.GradientTape() as tape:
                gradient = tape.gradient(weight * 2.0, weight.value)
            weight.assign_sub(gradient)

        row = tf.IndexedSlices(tf.constant([1.0]), tf.constant([0]))
        self.assert_refused("created without an aggregation", lambda: run(lambda: none.assign_add(1.0)))
        self.assert_refused("call assign of the variable", lambda: run(descend))
        self.assert_refused("outside of strategy.run", lambda: run(lambda: mean.scatter_update(row)))
        self.assert_refused("not its value plus something", lambda: run(lambda: metric.total.assign(5.0)))

    def datasets_have_an_element_for_each_replica(self) -> None:
        strategy, seen = self.strategy, []

        def of_function(context: tf.distribute.InputContext) -> tf.data.Dataset:
            seen.extend([context.num_replicas_in_sync, context.get_per_replica_batch_size(6)])
            return tf.data.Dataset.range(8).batch(3).map(lambda each: {"x": each})

        options = tf.distribute.InputOptions(experimental_per_replica_buffer_size=2, experimental_fetch_to_device=False)
        per_worker = strategy.experimental_distribute_datasets_from_function(of_function, options)
        whole = strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(3))
        values = strategy.experimental_distribute_values_from_function(lambda each: each.replica_id_in_sync_group * 5)
        for dataset, expected in (
            (per_worker, [{"x": [[0, 1, 2], [3, 4, 5]]}, {"x": [[6, 7], []]}]),
            (whole, [[[0, 1], [2]], [[3, 4], [5]], [[6], [7]]]),
        ):
            iterator = iter(dataset)
            assert [self.results(next_of, iterator) for _ in expected] == expected
        assert (seen, [*strategy.experimental_local_results(values)]) == ([2, 3], [0, 5])

    def what_is_done_once_for_a_worker_is_refused_on_each_of_its_devices(self) -> None:
        strategy = self.strategy
        with strategy.scope():
            variable = tf.Variable([1.0])
            rule = coordinator.updates.Asynchronous(keras.optimizers.SGD(0.1), [variable])

        def pull() -> Any:
            with rule.pull() as version:
                return version

        def update_with_parts() -> Any:
            def merged(strategy: Any, values: Any) -> Any:
                return strategy.extended.update(variable, lambda each, value: each.assign(value), args=(values,))

            return tf.distribute.get_replica_context().merge_call(merged, args=(number_of_replica()[None],))

        for words, function in (
            ("rule.pull() is used once for all devices of a worker", pull),
            (
                "rule.push() is used once for all devices of a worker",
                lambda: rule.push([tf.constant([1.0])], tf.constant(0, tf.int64)),
            ),
            ("differs between the replicas", update_with_parts),
            # As by TensorFlow's other strategies.
            (
                "Please use `tf.keras.losses.Reduction.SUM`",
                lambda: tf_keras.losses.MeanSquaredError()(tf.zeros([2, 1]), tf.ones([2, 1])),
            ),
        ):
            self.assert_refused(words, lambda function=function: strategy.run(function))  # type: ignore[misc]
        with pytest.raises(RuntimeError, match="was called on the client"):
            strategy.run(lambda: 0)

    def a_loop_equals_one_device_and_reads_and_changes_variables_once(self) -> None:
        operations = self._loop(None)
        assert [operations[kind] for kind in ("reads", "reads in loops and calls", "changes")] == [4, 0, 4]

    def rules_take_gradients_that_were_summed_on_the_worker(self) -> None:
        for kind in (coordinator.updates.Asynchronous, coordinator.updates.ModelAverage):
            self._loop(kind)

    def a_rule_has_the_gradients_of_two_workers_with_two_devices_each(self) -> None:
        one = one_device("dense")
        with self.strategy.scope():
            model = dense_model()
            model.set_weights(one.initial)
            rule = coordinator.updates.Synchronous(adam(), model.trainable_variables, grads_to_wait=4)
            model.compile(rule, loss())
        # An update has the gradients of all parts of a batch.
        for first in 2 * [*range(0, EXAMPLES, BATCH)]:
            batch = slice(first, first + BATCH)
            model.fit(X[batch], Y[batch], batch_size=BATCH // 4, shuffle=False, verbose=0)
        assert one.difference(model) < TOLERANCE
        assert int(model.optimizer.iterations) == STEPS
        assert len(rule.statistics().clocks) == 2
        self._loop(lambda *given: coordinator.updates.Synchronous(*given, grads_to_wait=2))

    def _loop(self, rule_class: Any) -> dict[str, Any]:
        """Trains two epochs by a loop of its own as one device does; returns what its step does with variables."""
        strategy, one = self.strategy, one_device("dense")
        with strategy.scope():
            model = dense_model()
            model.set_weights(one.initial)
            optimizer, metric = adam(), keras.metrics.Mean()
            optimizer.build(model.trainable_variables)
            rule = rule_class and rule_class(optimizer, model.trainable_variables)
        loss_of = loss()

        def replica(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                value = loss_of(y, model(x))
            gradients = tape.gradient(value, model.trainable_variables)
            metric.update_state(value * strategy.num_replicas_in_sync)
            if rule is None:
                optimizer.apply(gradients, model.trainable_variables)
            return value, gradients

        def step(iterator: Any) -> Any:
            with contextlib.nullcontext() if rule is None else rule.pull() as version:
                value, gradients = strategy.run(replica, args=next(iterator))
            if rule is not None:
                rule.push([strategy.reduce(SUM, each) for each in gradients], version)
            return strategy.reduce(SUM, value)

        concrete = self._train(tf.function(step, autograph=False))
        if rule is not None:
            rule.settle()
        assert one.difference(model) < TOLERANCE, rule
        assert int(optimizer.iterations) == STEPS, rule
        # Each device of each worker has had a part of each batch.
        assert float(metric.count) == 2 * len(strategy.cluster.workers) * STEPS
        operations = operations_of(concrete, model.trainable_variables)
        assert operations["devices"] == DEVICES
        return operations

    def _train(self, step: Any) -> Any:
        """Schedules a step with the batches of two epochs; returns what it was traced into.

        Several workers have parts of the same batches, one after the other.
        """
        workers = len(self.strategy.cluster.workers)

        def data(context: tf.distribute.InputContext) -> tf.data.Dataset:
            size = context.get_per_replica_batch_size(BATCH // workers)
            batches = tf.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(size, drop_remainder=True)
            return batches.shard(context.num_input_pipelines, context.input_pipeline_id)

        iterator = iter(self.strategy.experimental_distribute_datasets_from_function(data))
        for _ in range(STEPS):
            for worker in range(workers):
                self.strategy.schedule(step, args=(iterator,), worker=worker if workers > 1 else None)
            if workers > 1:
                self.strategy.join()
        self.strategy.join()
        with self.strategy.extended.scheduled_tracing():
            return step.get_concrete_function(iterator)

    def fit_equals_one_device_whatever_the_data(self) -> None:
        whole = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
        per_worker = self.strategy.experimental_distribute_dataset(whole)
        source = coordinator.data.arrays(X, Y)

        def of_function(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return tf.data.Dataset.from_tensor_slices((X, Y)).batch(context.get_per_replica_batch_size(BATCH))

        self._fit("Nadam", {"x": per_worker, "validation_data": per_worker}, steps_per_execution=2)
        self._fit("AdamW", {"x": of_function})
        of_source = {"x": source, "batch_size": BATCH, "shuffle": False, "validation_data": source}
        self._fit("a source and a rule", of_source, rule=coordinator.updates.Asynchronous)

    def _fit(self, name: str, data: dict[str, Any], rule: Any = None, **compiled: Any) -> None:
        expected = one_device(name if name in OPTIMIZERS else "dense")
        with self.strategy.scope():
            model = dense_model()
            model.set_weights(expected.initial)
            made = OPTIMIZERS.get(name, adam)()
            made = rule(made, model.trainable_variables) if rule else made
            model.compile(made, loss(), metrics=["accuracy"], **compiled)
        history = model.fit(**data, epochs=2, verbose=0).history
        evaluated = model.evaluate(X, Y, verbose=0)
        assert expected.difference(model) < TOLERANCE, name
        for log in ("loss", "accuracy"):
            np.testing.assert_allclose(history[log], expected.history[log], atol=TOLERANCE, err_msg=name)
        assert abs(history.get("val_loss", evaluated[:1])[-1] - evaluated[0]) < TOLERANCE, name
        assert int(model.optimizer.iterations) == STEPS, name

    def models_of_any_kind_are_trained_or_refused(self) -> None:
        arguments = {"batch_size": 15, "epochs": 1, "shuffle": False, "verbose": 0}
        with self.strategy.scope():
            accumulating = dense_model()
            layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
            normalized = keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(3)])
            normalized.compile(adam(), loss())
            accumulating.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), loss())
        normalized.fit(X, Y, **arguments)
        assert all(np.isfinite(each.numpy()).all() for each in normalized.non_trainable_variables)
        seed = next(each for each in normalized.non_trainable_variables if "seed" in each.path)
        assert int(seed.numpy()[1]) == 2 * 5
        with pytest.raises(ValueError, match="gradient_accumulation_steps accumulates in each replica"):
            accumulating.fit(X, Y, **arguments)

    def rows_of_a_table_are_looked_up_on_each_device_and_changed_once(self) -> None:
        def rows(keys: Any, dim: int) -> Any:
            return tf.ones([tf.size(keys), dim]) * tf.cast(keys, tf.float32)[:, None] * 0.1

        def fit_on_one_device() -> list[float]:
            @tf.function
            def step(keys: Any, y: Any) -> Any:
                with tf.GradientTape() as tape:
                    # Keras divides it by the number of replicas.
                    value = loss()(y, model(keys, training=True)) * self.strategy.num_replicas_in_sync
                model.optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
                return value

            batches = 2 * [slice(first, first + BATCH) for first in range(0, EXAMPLES, BATCH)]
            losses = [float(self.strategy.schedule(step, args=(KEYS[each], Y[each])).result()) for each in batches]
            return np.reshape(losses, [2, -1]).mean(axis=1).tolist()

        found = []
        for name in ("one", "two"):
            with self.strategy.scope():
                table = coordinator.embeddings.Table(name, 4, 100, adam(), initializer=rows)
                layers = [coordinator.embeddings.Embedding(table), keras.layers.Flatten()]
                last = keras.layers.Dense(3, kernel_initializer="ones")
                model = keras.Sequential([keras.Input((2,), dtype="int64"), *layers, last])
                model.compile(adam(), loss())
            arguments = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
            found.append(model.fit(KEYS, Y, **arguments).history["loss"] if name == "two" else fit_on_one_device())
            assert (table.statistics().steps, table.statistics().size) == (STEPS, 7)
        np.testing.assert_allclose(*found, atol=TOLERANCE)

    def servers_are_lost_and_a_worker_with_other_devices_takes_no_part(self) -> None:
        strategy, cluster = self.strategy, self.cluster
        with strategy.scope():
            count = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(count=count), tempfile.mkdtemp(), max_to_keep=1)
        strategy.restore_from(manager)

        def replica() -> Any:
            count.assign_add(1.0)
            return number_of_replica()

        function = tf.function(lambda: strategy.reduce(SUM, strategy.run(replica)))

        def run_twenty() -> None:
            assert [int(each.result()) for each in [strategy.schedule(function) for _ in range(20)]] == [3] * 20

        run_twenty()
        manager.save()
        cluster.restart("worker", 0)
        run_twenty()
        said: list[str] = []
        logging.getLogger("coordinator").addFilter(lambda record: said.append(record.getMessage()) or True)
        strategy.cluster.add_worker(cluster.start_worker(devices=1))
        cluster.restart("ps", 0)
        run_twenty()
        # Those since the checkpoint are lost with the parameter server. What was run again counts again.
        assert float(count) >= 2 * 40
        assert any("has 1 CPU device, and the other workers have 2 CPU devices" in each for each in said), said


def next_of(iterator: Any) -> Any:
    return next(iterator)


def operations_of(concrete: Any, variables: Sequence[Any]) -> dict[str, Any]:
    """Returns how many operations read and change variables, and the devices of multiplications."""
    handles = {id(variable.value.handle) for variable in variables}
    captured = concrete.captured_inputs
    symbolic = concrete.inputs[len(concrete.inputs) - len(captured) :]
    names = {inside.op.name for outside, inside in zip(captured, symbolic, strict=True) if id(outside) in handles}
    definition = concrete.graph.as_graph_def()
    mine = [node for node in definition.node if node.input and node.input[0] in names]
    inner = [node for function in definition.library.function for node in function.node_def]
    return {
        "reads": sum(node.op == "ReadVariableOp" for node in mine),
        "reads in loops and calls": sum(node.op == "ReadVariableOp" for node in inner),
        "changes": sum(node.op.startswith("Assign") for node in mine),
        "devices": sorted({node.device for node in definition.node if node.op == "MatMul"}),
    }


if __name__ == "__main__":
    check(Scenarios)
