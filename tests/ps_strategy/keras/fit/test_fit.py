"""Tests that `fit` trains models of every kind, reports exact logs, and raises the errors of steps."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster

RNG = np.random.default_rng(0)
X = RNG.normal(size=(240, 8)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")


def classifier(*first: Any) -> keras.Sequential:
    return keras.Sequential([*first, keras.layers.Dense(16, "relu"), keras.layers.Dense(2)])


def compiled(strategy: coordinator.ParameterServerStrategy, model: keras.Model, **arguments: Any) -> keras.Model:
    with strategy.scope():
        model.compile(
            keras.optimizers.Adam(0.01),
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
    """Has a wide and a deep part, a loss of its own, and is built by its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = classifier()
        self.wide = keras.layers.Dense(2)

    def call(self, x: Any, training: bool = False) -> Any:
        self.add_loss(0.001 * tf.reduce_mean(self.wide(x) ** 2))
        return self.deep(x) + self.wide(x)


def functional() -> keras.Model:
    inputs = {"a": keras.Input((5,), name="a"), "b": keras.Input((3,), name="b")}
    hidden = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Dropout(0.1)(hidden)))


# row 189: a wide and a deep part
def test_models_are_functional_or_subclassed(strategy: coordinator.ParameterServerStrategy) -> None:
    for make, x in ((Wide, X), (functional, {"a": X[:, :5], "b": X[:, 5:]})):
        with strategy.scope():
            model = compiled(strategy, make())
        losses = model.fit(x, Y, batch_size=24, epochs=4, verbose=0).history["loss"]
        assert losses[-1] < losses[0], make
        assert int(model.optimizer.iterations) == 40


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
        lambda: model.evaluate(bad, Y, batch_size=24, verbose=0),
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

    history = model.fit(dataset_fn, steps_per_epoch=15, epochs=3, verbose=0).history
    assert int(model.optimizer.iterations) == 45
    assert model.evaluate(tf.constant(words[:, None]), labels, verbose=0)[0] < history["loss"][0]


# row 185: what cannot run is refused
def test_what_cannot_be_fitted_is_refused(strategy: coordinator.ParameterServerStrategy) -> None:
    for option in ("run_eagerly", "jit_compile"):
        with strategy.scope():
            model = compiled(strategy, classifier(), **{option: True})
        for call in (lambda: model.fit(X, Y), lambda: model.evaluate(X, Y), lambda: model.predict(X)):  # noqa: B023
            with pytest.raises(ValueError, match=option):
                call()
    outside = classifier(keras.Input((8,)))
    outside.compile("sgd", "mse")
    with strategy.scope(), pytest.raises(ValueError, match=r"variables of model .* are not on parameter servers"):
        outside.fit(X, Y, verbose=0)

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
            if batch == 20 and not killed:
                killed.append(batch)
                shared_cluster.kill("worker", 0)

    killed: list[int] = []
    model = normalized
    model.optimizer.iterations.assign(0)
    try:
        fitted = model.fit(X, Y, batch_size=8, epochs=3, callbacks=[Killer()], validation_data=(X, Y), verbose=0)
    finally:
        shared_cluster.restart("worker", 0)
    assert killed
    # The steps that were running run again.
    assert 90 <= int(model.optimizer.iterations) <= 90 + counted().retried
    assert {name: len(values) for name, values in fitted.history.items()} == dict.fromkeys(
        ("loss", "accuracy", "val_loss", "val_accuracy"), 3
    )
