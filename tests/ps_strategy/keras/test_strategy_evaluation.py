"""Tests that `strategy.evaluate` and `model.evaluate` count each example once, also when servers are lost."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.data import arrays
from coordinator.testing import LocalCluster
from tests.program_runner import ProgramRunner
from tests.ps_strategy.every_worker import TIMEOUT

RNG = np.random.default_rng(3)
X = RNG.normal(size=(600, 4)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("float32")[:, None]


class Seen(keras.metrics.Metric):
    """Counts examples."""

    def __init__(self) -> None:
        super().__init__(name="seen")
        self.count = self.add_weight(name="count", initializer="zeros", dtype="int64")

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(tf.shape(y, tf.int64)[0])

    def result(self) -> Any:
        return tf.identity(self.count)


def classifier() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
    model.compile(loss="binary_crossentropy", metrics=[keras.metrics.AUC(name="auc"), Seen()])
    return model


def expected() -> dict[str, float]:
    outputs, auc = classifier()(X), keras.metrics.AUC()
    auc.update_state(Y, outputs)
    loss = keras.losses.BinaryCrossentropy()(Y, outputs)
    return {"loss": float(loss), "auc": float(auc.result()), "seen": len(X)}


def shares(context: tf.distribute.InputContext) -> tf.data.Dataset:
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    return data.shard(context.num_input_pipelines, context.input_pipeline_id).batch(16)


@pytest.mark.long
def test_every_kind_of_data_gives_the_result_of_one_process(strategy: coordinator.ParameterServerStrategy) -> None:
    truth = expected()
    with strategy.scope():
        model = classifier()
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (arrays(X, Y), {"batch_size": 16, "shards": 100}),
        (tf.data.Dataset.from_tensor_slices((X, Y)).batch(16), {"shards": 3}),
        # Another order each time it is read.
        (lambda context: shares(context).unbatch().shuffle(600).batch(16), {}),
    ]
    for data, settings in kinds:
        found = strategy.evaluate(model, data, **settings)
        assert found == pytest.approx(truth, rel=1e-5)
        assert found["seen"] == len(X)
    assert not any(np.any(tf.convert_to_tensor(each)) for metric in model.metrics for each in metric.variables)
    found = model.evaluate(arrays(X, Y), batch_size=16, verbose=0, return_dict=True)
    assert found == pytest.approx(truth, rel=1e-5)


def test_a_model_that_was_compiled_again_is_evaluated_as_it_is_now(
    strategy: coordinator.ParameterServerStrategy,
) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        weight = tf.Variable(2.0)
    errors = np.abs(model.predict(X[:32], verbose=0) - Y[:32])
    for loss, value in (("mse", errors**2), ("mae", errors)):
        with strategy.scope():
            model.compile(loss=loss)
        assert strategy.evaluate(model, (X[:32], Y[:32]))["loss"] == pytest.approx(value.mean(), rel=1e-5)
    # Any callable is evaluated with given metrics.
    found = strategy.evaluate(lambda x: weight * x, X, metrics=[keras.metrics.Mean(name="mean")])
    assert found == {"mean": pytest.approx(2 * X.mean(), rel=1e-5)}


def test_a_snapshot_is_of_one_moment_while_the_model_is_trained(strategy: coordinator.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    weight = model.weights[0].value

    @tf.function
    def step() -> None:
        weight.assign_add(tf.ones([1, 1]))

    source = arrays(np.ones([64, 1], np.float32), np.zeros([64, 1], np.float32))
    metrics = [keras.metrics.MeanSquaredError(name="square"), keras.metrics.MeanAbsoluteError(name="mean")]
    for _ in range(50):
        strategy.schedule(step)
    found = strategy.evaluate(model, source, metrics, batch_size=1, shards=16, model_state="snapshot")
    assert found["square"] == pytest.approx(found["mean"] ** 2, rel=1e-5)
    strategy.join(TIMEOUT)


def test_what_cannot_be_evaluated_is_refused_in_words(strategy: coordinator.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = classifier()
    endless = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).repeat()
    local = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    cases: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("endless", model, endless, {}),
        ("datasets have batches", model, endless.take(3), {"batch_size": 4}),
        ("not created in the scope", local, X, {}),
        (r"Give metrics=\[", tf.function(lambda x: x), X, {}),
        (r"the same number of rows, got \[5, 600\]", model, (X, Y[:5]), {}),
        ('"now" or "snapshot", got \'then\'', model, X, {"model_state": "then"}),
        ("shards must be", model, X, {"shards": 0}),
    ]
    for words, evaluated, data, settings in cases:
        with pytest.raises(ValueError, match=words):
            strategy.evaluate(evaluated, data, **settings)


def test_a_worker_that_dies_during_evaluation_counts_nothing_twice(
    strategy: coordinator.ParameterServerStrategy, shared_cluster: LocalCluster
) -> None:
    logged: list[Any] = []

    class Killer(keras.callbacks.Callback):
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            if not logged:
                shared_cluster.kill("worker", 0)
            logged.append(logs)

    with strategy.scope():
        model = classifier()
    try:
        found = model.evaluate(X, Y, batch_size=10, verbose=0, return_dict=True, callbacks=[Killer()])
        assert strategy.evaluate(model, (X, Y), batch_size=100) == pytest.approx(found, rel=1e-5)
    finally:
        shared_cluster.restart("worker", 0)
    assert found == pytest.approx(expected(), rel=1e-5)
    assert found["seen"] == len(X)
    # As in one process: one turn for each batch, and the last one has the logs of all.
    assert len(logged) == 60
    assert {name: float(value) for name, value in logged[-1].items()} == pytest.approx(found)
    assert float(model.metrics[0].count) == pytest.approx(len(X))


@pytest.mark.long
def test_metrics_that_are_no_sums_are_evaluated_batch_by_batch(
    strategy: coordinator.ParameterServerStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    class Last(Seen):
        def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
            self.count.assign(tf.maximum(self.count.value, tf.shape(y, tf.int64)[0]))

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(loss="mse", metrics=[Last()])
    for _ in range(2):
        assert model.evaluate(X, Y, batch_size=32, verbose=0, return_dict=True)["seen"] == 32
    [warning] = [record.getMessage() for record in caplog.records if "one by one" in record.getMessage()]
    assert "the metric 'seen' is no sum over batches" in warning


PARAMETER_SERVER_DIES = """
    import tempfile
    import threading

    import keras
    import numpy as np
    import tensorflow as tf

    import coordinator
    from coordinator.testing import LocalCluster

    x = np.arange(4000, dtype=np.float32)[:, None]
    with LocalCluster(workers=2, ps=1) as cluster, coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), tempfile.mkdtemp(), 1)
        strategy.restore_from(manager)
        manager.save()
        source = coordinator.data.arrays(x, x)
        metrics = [keras.metrics.MeanSquaredError(name="error"), keras.metrics.Mean(name="mean")]
        metrics[1].update_state = lambda y, outputs: keras.metrics.Mean.update_state(metrics[1], outputs)
        for state in ("snapshot", "now"):
            for kills in (False, True):
                killing = threading.Thread(target=cluster.restart, args=("ps", 0))
                if kills:
                    killing.start()
                found = strategy.evaluate(model, source, metrics, batch_size=1, shards=8, model_state=state)
                if kills:
                    killing.join()
                np.testing.assert_allclose([found["error"], found["mean"]], [0, 1999.5], rtol=1e-5)
                # The copies of a snapshot belong to no checkpoint.
                assert manager.save()
"""


@pytest.mark.cluster
@pytest.mark.long
def test_each_example_counts_once_when_a_parameter_server_is_restored(run_program: ProgramRunner) -> None:
    run_program(PARAMETER_SERVER_DIES, timeout=280)
