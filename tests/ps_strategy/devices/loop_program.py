"""A client whose replicas combine values, change variables and take steps; see `client.py`."""

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
import tf_keras

import coordinator
from coordinator.ps_strategy.fusing.graph_copies import packed_function
from tests.ps_strategy.devices.client import (
    BATCH,
    EXAMPLES,
    MEAN,
    SERIES,
    STEPS,
    SUM,
    Client,
    X,
    Y,
    adam,
    dense_model,
    loss,
    one_device,
    recurrent_model,
    replica_number,
    write_observations,
)


class Loops(Client):
    """Scenarios without `fit`."""

    def combining(self) -> Any:
        """`run`, `reduce`, `gather` and what replicas tell each other."""
        strategy = self.strategy

        def replica() -> Any:
            context = tf.distribute.get_replica_context()
            number = tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0
            rows = tf.IndexedSlices(
                number[tf.newaxis, tf.newaxis], context.replica_id_in_sync_group[tf.newaxis], [2, 1]
            )
            summed = context.all_reduce(SUM, {"number": number, "rows": rows})
            return number, summed["number"], tf.convert_to_tensor(summed["rows"]), context.all_gather(number[None], 0)

        def combined() -> Any:
            values = strategy.run(lambda: tf.fill([2], 1.0 + tf.cast(replica_number(), tf.float32)))
            return (
                strategy.reduce(SUM, values, axis=0),
                strategy.reduce(MEAN, values, axis=0),
                strategy.gather(values, 0),
            )

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
            weight = keras.Variable("ones", shape=(1,))

        def descend() -> None:
            with tf.GradientTape() as tape:
                gradient = tape.gradient(weight * 2.0, weight.value)
            weight.assign_sub(gradient)

        def replica() -> Any:
            weight.assign(tf.nn.relu(weight - 4.0 * tf.cast(replica_number(), tf.float32)))
            number = tf.cast(replica_number(), tf.float32) + 1.0
            total.assign_add(number)
            total.assign(total - number * 10.0)
            first.assign(number * 3.0)
            mean.assign_sub([number, 0.0])
            metric.update_state(number)
            return total.read_value(), state.next()

        reads, seeds = self.results(lambda: self.strategy.run(replica))
        changed = [each.numpy().tolist() for each in (total, first, mean, weight)]
        return {
            "changed": changed,
            "read": reads,
            "seeds": seeds,
            "metric": [metric.result().numpy().item(), metric.count.numpy().item()],
            "refused": self.refusal(lambda: self.strategy.run(lambda: none.assign_add(1.0))),
            "refused weight": self.refusal(lambda: self.strategy.run(descend)),
            "refused rows": self.refusal(lambda: self.strategy.run(lambda: mean.scatter_update(_row()))),
            "refused metric": self.refusal(lambda: self.strategy.run(lambda: metric.total.assign(5.0))),
        }

    def datasets(self) -> Any:
        """The elements that replicas get."""
        strategy, seen = self.strategy, []

        def of_function(context: tf.distribute.InputContext) -> tf.data.Dataset:
            seen.extend([context.num_replicas_in_sync, context.get_per_replica_batch_size(6)])
            return tf.data.Dataset.range(8).batch(3).map(lambda each: {"x": each})

        options = tf.distribute.InputOptions(experimental_per_replica_buffer_size=2, experimental_fetch_to_device=False)
        per_worker = strategy.experimental_distribute_datasets_from_function(of_function, options)
        whole = strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(3))
        values = strategy.experimental_distribute_values_from_function(lambda each: each.replica_id_in_sync_group * 5)
        found = {}
        for name, dataset, count in (("function", per_worker, 2), ("dataset", whole, 3)):
            iterator = iter(dataset)
            found[name] = [self.results(next_of, iterator) for _ in range(count)]
        return {"context": seen, "values": list(strategy.experimental_local_results(values)), **found}

    def loop(self) -> Any:
        """A custom loop, whose replicas apply the optimizer."""
        return self._loop(None)

    def _loop(self, rule_class: Any) -> Any:
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
        return {
            "difference": one.difference(model),
            "updates": int(optimizer.iterations.numpy()),
            "batches": metric.count.numpy().item(),
            **operations_of(concrete, model.trainable_variables),
        }

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
        return self.concrete(step, iterator)

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
                number = tf.cast(replica_number(), tf.float32)[None]

                def merged(strategy: Any, values: Any) -> Any:
                    return strategy.extended.update(variable, lambda each, value: each.assign(value), args=(values,))

                return tf.distribute.get_replica_context().merge_call(merged, args=(number,))

            return self.strategy.run(replica)

        def mean_loss() -> Any:
            return tf_keras.losses.MeanSquaredError()(tf.zeros([2, 1]), tf.ones([2, 1]))

        mirrored = tf.distribute.MirroredStrategy(["/cpu:0"])
        try:
            mirrored.run(tf.function(mean_loss, autograph=False))
            reduction = "none"
        except ValueError as error:
            reduction = f"ValueError: {error}"
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
            "reduction": self.refusal(lambda: self.strategy.run(mean_loss)),
            "reduction of MirroredStrategy": reduction,
        }

    def rules(self) -> Any:
        """A custom loop with update rules."""
        updates = coordinator.updates
        kinds = {"Asynchronous": updates.Asynchronous, "ModelAverage": updates.ModelAverage}
        kinds["Synchronous"] = lambda *given: updates.Synchronous(*given, grads_to_wait=1)
        return {name: self._loop(kind) for name, kind in kinds.items()}

    def two_workers(self) -> Any:
        """A loop and fits of the same batches, in which an update has the gradients of all parts of a batch."""
        one = one_device("dense")
        with self.strategy.scope():
            model = dense_model()
            model.set_weights(one.initial)
            rule = coordinator.updates.Synchronous(adam(), model.trainable_variables, grads_to_wait=4)
            model.compile(rule, loss())
        for first in 2 * [*range(0, EXAMPLES, BATCH)]:
            batch = slice(first, first + BATCH)
            model.fit(X[batch], Y[batch], batch_size=BATCH // 4, shuffle=False, verbose=0)
        updates = int(model.optimizer.iterations.numpy())
        return {
            "loop": self._loop(lambda *given: coordinator.updates.Synchronous(*given, grads_to_wait=2)),
            "fit": {"difference": one.difference(model), "updates": updates, "clocks": rule.statistics().clocks},
        }

    def recurrent(self) -> Any:
        """`fit` of a recurrent model, whose loops read variables."""
        one = one_device("recurrent")
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
        nodes = packed.graph.get_operations()
        reads = [node for node in nodes if node.type == "ReadVariableOp"]
        return {
            "difference": one.difference(model),
            "before": operations_of(concrete, model.trainable_variables),
            "reads": len(reads),
            "variables read": len({node.inputs[0].name for node in reads}),
            "loops": sum(node.type == "StatelessWhile" for node in nodes),
        }


def next_of(iterator: Any) -> Any:
    return next(iterator)


def _row() -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant([1.0]), tf.constant([0]))


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
    write_observations(Loops)
