"""Tests that `fit` trains models of every kind, reports exact logs, raises errors, and returns right predictions."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.data import arrays, client
from coordinator.testing import LocalCluster
from tests.program_runner import ProgramRunner

RNG = np.random.default_rng(0)
X = RNG.normal(size=(240, 8)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")


def classifier(*first: Any) -> keras.Sequential:
    return keras.Sequential([*first, keras.layers.Dense(2)])


def compiled(strategy: coordinator.ParameterServerStrategy, model: keras.Model, **arguments: Any) -> keras.Model:
    with strategy.scope():
        model.compile(
            keras.optimizers.SGD(0.1),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            **arguments,
        )
    return model


@pytest.fixture(scope="module")
def normalized(strategy: coordinator.ParameterServerStrategy) -> keras.Model:
    """A model for several tests, so that its functions are traced once."""
    with strategy.scope():
        return compiled(strategy, classifier(keras.layers.BatchNormalization()))


# row 65: ten epochs give ten losses
# row 180: ten epochs of ten steps are counted as a hundred
def test_ten_epochs_of_ten_steps_are_a_hundred_updates(normalized: keras.Model) -> None:
    model = normalized
    model.optimizer.iterations.assign(0)
    before = model.evaluate(X, Y, verbose=0, return_dict=True)["loss"]
    history = model.fit(X, Y, batch_size=24, epochs=10, verbose=0).history
    assert int(model.optimizer.iterations) == 100
    assert len(history["loss"]) == 10
    result = model.evaluate(X, Y, verbose=0, return_dict=True)
    assert result["loss"] < before
    predicted = model.predict(X, verbose=0).argmax(axis=1)
    assert result["accuracy"] == pytest.approx(np.mean(predicted == Y))


class Wide(keras.Model):
    """Has a wide and a deep part, two inputs, a loss of its own, and is built by its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = classifier()
        self.wide = keras.layers.Dense(2)

    def call(self, x: Any, training: bool = False) -> Any:
        self.add_loss(0.001 * tf.reduce_mean(self.wide(x["a"]) ** 2))
        return self.deep(x["b"]) + self.wide(x["a"])


# row 189: a wide and a deep part
def test_a_subclassed_model_of_several_inputs_learns(strategy: coordinator.ParameterServerStrategy) -> None:
    def batches() -> Iterator[Any]:
        for first in [*range(0, 240, 24)] * 2:
            x = X[first : first + 24]
            yield {"a": x[:, :5], "b": x[:, 5:]}, Y[first : first + 24]

    with strategy.scope():
        model = compiled(strategy, Wide())
    losses = model.fit(batches(), steps_per_epoch=10, epochs=2, shuffle=False, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert int(model.optimizer.iterations) == 20


def test_the_logs_of_an_epoch_cover_all_its_steps(strategy: coordinator.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = classifier()
        model.compile(
            keras.optimizers.SGD(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=[keras.metrics.MeanMetricWrapper(lambda y, _: y, name="mean_of_y")],
        )
    before = strategy.events.recorded
    # The last batch is smaller.
    history = model.fit(X, Y, batch_size=25, epochs=2, verbose=0).history
    assert history["mean_of_y"] == pytest.approx([Y.mean()] * 2)
    events, _, _ = strategy.events.since(before)
    assert {event.name for event in events if event.kind == "value_reported"} == {"loss", "mean_of_y"}
    started = {event.name for event in events if event.kind == "closures_started"}
    # Copies of the step are prepared in the background.
    assert {name for name in started if not name.startswith("prepare ")} == {"train_step"}


def test_single_batches_are_trained_on_and_evaluated(normalized: keras.Model) -> None:
    model, before = normalized, int(normalized.optimizer.iterations)
    weights = model.get_weights()
    for _ in range(11):
        assert np.isfinite(model.train_on_batch(X[:10], Y[:10], return_dict=True)["loss"])
    assert not np.allclose(model.get_weights()[-1], weights[-1])
    assert np.isfinite(model.test_on_batch(X[:10], Y[:10], return_dict=True)["loss"])
    np.testing.assert_allclose(model.predict_on_batch(X[:10]), model.predict(X[:10], verbose=0), rtol=1e-5)
    assert int(model.optimizer.iterations) == before + 11


def test_an_error_of_a_step_is_raised_by_fit_and_the_next_fit_works(
    strategy: coordinator.ParameterServerStrategy,
) -> None:
    class FailingLayer(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            with tf.control_dependencies([tf.debugging.assert_less(x, 100.0, message="too large")]):
                return tf.identity(x)

    with strategy.scope():
        model = compiled(strategy, classifier(FailingLayer()))
    bad = X.copy()
    bad[100] = 1000.0
    for call in (
        lambda: model.fit(bad, Y, batch_size=24, epochs=2, verbose=0),
        lambda: model.predict(bad, batch_size=24, verbose=0),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
            call()
        strategy.join()
    before = int(model.optimizer.iterations)
    model.fit(X, Y, batch_size=24, verbose=0)
    assert int(model.optimizer.iterations) == before + 10


# row 172: preprocessing in the pipeline or in the model
def test_fit_accepts_preprocessing_in_the_pipeline_and_in_the_model(
    strategy: coordinator.ParameterServerStrategy,
) -> None:
    words = np.array(["no", "maybe", "yes", "never"])[RNG.integers(4, size=240)]
    labels = np.isin(words, ["yes", "maybe"]).astype("int32")
    with strategy.scope():
        look_up = keras.layers.StringLookup(vocabulary=["no", "maybe", "yes"])
        layers = [keras.layers.Embedding(4, 3), keras.layers.Flatten(), keras.layers.Dense(2)]
        model = compiled(strategy, keras.Sequential([keras.Input((1,), dtype="string"), look_up, *layers]))
        look_up_label = keras.layers.StringLookup(vocabulary=["a", "b"], num_oov_indices=0)

    def dataset_fn(_: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices((words[:, None], np.array(["a", "b"])[labels])).repeat().batch(24)
        return dataset.map(lambda x, y: (x, look_up_label(y)))

    history = model.fit(dataset_fn, steps_per_epoch=10, epochs=2, verbose=0).history
    assert int(model.optimizer.iterations) == 20
    assert model.evaluate(tf.constant(words[:, None]), labels, verbose=0)[0] < history["loss"][0]


# row 185: what cannot run is refused
def test_what_cannot_be_fitted_is_refused(strategy: coordinator.ParameterServerStrategy) -> None:
    for option in ("run_eagerly", "jit_compile"):
        with strategy.scope():
            model = compiled(strategy, classifier(), **{option: True})
        for call in (lambda: model.fit(X, Y), lambda: model.evaluate(X, Y), lambda: model.predict(X)):  # noqa: B023
            with pytest.raises(ValueError, match=option):
                call()
    # An optimizer that only a step of its own uses, too.
    model = compiled(strategy, classifier(keras.Input((8,))))
    with strategy.scope():
        beside = compiled(strategy, classifier(keras.Input((8,))))
    beside.another = [keras.optimizers.Adam(name="outside")]
    for each, word in ((model, "dense"), (beside, "outside/iteration")):
        with strategy.scope(), pytest.raises(ValueError, match=rf"are not on parameter servers, '.*{word}.* among"):
            each.fit(X, Y, verbose=0)

    def dataset_fn(_: tf.distribute.InputContext) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(24)

    with strategy.scope():
        model = compiled(strategy, classifier())
    for name, value in {"y": Y, "class_weight": {0: 1.0, 1: 2.0}, "sample_weight": Y}.items():
        with pytest.raises(ValueError, match=f"{name} cannot be given along with a dataset function"):
            model.fit(dataset_fn, verbose=0, **{name: value})
    with pytest.raises(ValueError, match="no order in its outputs"):
        model.predict(dataset_fn, verbose=0)


# row 74: a worker that dies in the middle of an epoch
def test_a_worker_that_dies_during_an_epoch_changes_no_result(
    normalized: keras.Model, shared_cluster: LocalCluster, counted: Any
) -> None:
    class Killer(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 8 and not killed:
                killed.append(batch)
                shared_cluster.kill("worker", 0)

    killed: list[int] = []
    model = normalized
    model.optimizer.iterations.assign(0)
    try:
        fitted = model.fit(X, Y, batch_size=16, epochs=2, callbacks=[Killer()], validation_data=(X, Y), verbose=0)
    finally:
        shared_cluster.restart("worker", 0)
    assert killed
    # The steps that were running run again.
    assert 30 <= int(model.optimizer.iterations) <= 30 + counted().retried
    assert {name: len(values) for name, values in fitted.history.items()} == dict.fromkeys(
        ("loss", "accuracy", "val_loss", "val_accuracy"), 2
    )


@pytest.fixture(scope="module")
def models(strategy: coordinator.ParameterServerStrategy) -> tuple[keras.Model, keras.Model]:
    """Two models of the same weights, with and without the strategy. They have two outputs."""

    def make() -> keras.Model:
        inputs = keras.Input((8,))
        outputs = {"sum": keras.layers.Dense(1)(inputs), "wide": keras.layers.Dense(4, "tanh")(inputs)}
        return keras.Model(inputs, outputs)

    with strategy.scope():
        distributed = make()
        distributed.compile(steps_per_execution=2)
    local = make()
    local.set_weights(distributed.get_weights())
    return distributed, local


def assert_close(found: Any, expected: Any) -> None:
    tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


# row 183: equal inputs give equal predictions
def test_predictions_are_those_of_one_process(models: tuple[keras.Model, keras.Model]) -> None:
    distributed, local = models
    seen: list[Any] = []
    callback = keras.callbacks.LambdaCallback()
    callback.on_predict_batch_end = lambda batch, logs: seen.append(np.array(logs["sum"]))
    dataset = tf.data.Dataset.from_tensor_slices(X).batch(5)
    expected = local.predict(X, verbose=0)
    for x, arguments, count in (
        (X[:47], {"batch_size": 4}, 47),
        (dataset, {"steps": 6}, 30),
        (arrays(X, X[:, 0]), {"batch_size": 50}, 240),
        (client(list(X)), {"batch_size": 50, "steps": 4}, 200),
    ):
        seen.clear()
        found = distributed.predict(x, verbose=0, callbacks=[callback], **arguments)
        assert_close(found, {name: value[:count] for name, value in expected.items()})
        assert_close(np.concatenate(seen), found["sum"])


PROGRAM = """
    import keras
    import numpy as np
    import tensorflow as tf

    import coordinator
    from coordinator.testing import LocalCluster

    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 6)).astype("float32")
    y = (x[:, 0] * x[:, 1] > 0).astype("int32")
    start = [rng.normal(scale=0.3, size=shape).astype("float32") for shape in ((6, 12), (12,), (12, 2), (2,))]


    def train(strategy, **options):
        with strategy.scope():
            hidden, scaled = keras.layers.Dense(12, "tanh"), keras.layers.BatchNormalization()
            model = keras.Sequential([keras.Input((6,)), hidden, scaled, keras.layers.Dense(2)])
            model.layers[0].set_weights(start[:2])
            model.layers[2].set_weights(start[2:])
            model.compile(
                keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.02, 20, 0.9), clipnorm=1.0),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(1)],
                **options,
            )
        history = model.fit(
            x, y, batch_size=32, epochs=4, shuffle=False, validation_split=0.2, class_weight={0: 1.0, 1: 2.0}, verbose=0
        ).history
        values = {name: np.array(value) for name, value in history.items()}
        values["evaluated"] = np.array(model.evaluate(x, y, verbose=0))
        values["predicted"] = model.predict(x, batch_size=7, verbose=0)
        state = [*model.weights, *model.optimizer.variables, *model.metrics_variables]
        # Layers are named by counters that continue from model to model.
        values |= {f"variable {number}": variable.numpy() for number, variable in enumerate(state)}
        return values


    def compare(first, second):
        assert first.keys() == second.keys() and len(first) > 30
        for name, value in first.items():
            np.testing.assert_allclose(second[name], value, rtol=2e-3, atol=2e-5, err_msg=name)


    expected = train(tf.distribute.get_strategy())
    compare(expected, train(tf.distribute.MirroredStrategy(["/cpu:0"])))
    with LocalCluster(workers=1, ps=2) as cluster:
        with coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
            compare(expected, train(strategy))
            compare(expected, train(strategy, steps_per_execution=3))
    print("equal")
"""


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(300)
# row 180: like one process
def test_fit_with_one_worker_equals_fit_in_one_process_and_under_mirrored_strategy(run_program: ProgramRunner) -> None:
    assert run_program(PROGRAM, timeout=280).stdout.endswith("equal\n")
