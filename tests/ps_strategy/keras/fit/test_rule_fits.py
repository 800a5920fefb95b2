"""Tests that `fit` trains models that are compiled with an update rule, as without one, with all callbacks."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.updates import Asynchronous, BoundedDelay, Delayed, ModelAverage, StaleSynchronous, Synchronous
from tests.updates.descent import descend, mostly_long

# Keras reads learning rates in a way that NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

RNG = np.random.default_rng(5)
X = RNG.normal(size=(96, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)

RULES = {
    "asynchronous": Asynchronous,
    "synchronous": lambda *model: Synchronous(*model, grads_to_wait=2),
    "stale synchronous": lambda *model: StaleSynchronous(*model, get_model_frequency=2, max_lead=2),
    "bounded delay": lambda *model: BoundedDelay(*model, max_delay=1),
    "delayed": lambda *model: Delayed(*model, delay=0.0),
    "model average": ModelAverage,
}


def new_model() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    )
    for number, variable in enumerate(model.trainable_variables):
        variable.assign(tf.random.stateless_normal(variable.shape, [number, 3]))
    return model


class Seen(keras.callbacks.Callback):
    """Counts the calls of callbacks, and checks that the model can be read in them."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.losses.append(self.model.evaluate(X, Y, batch_size=96, verbose=0, return_dict=True)["loss"])


@pytest.mark.parametrize("name", mostly_long(RULES, "synchronous"))
def test_fit_trains_by_the_rule_with_all_callbacks(
    strategy: coordinator.ParameterServerStrategy, name: str, tmp_path: Any
) -> None:
    with strategy.scope():
        model = new_model()
        optimizer = keras.optimizers.SGD(0.05)
        rule = RULES[name](optimizer, model.trainable_variables)
        model.compile(optimizer=rule, loss="mse", metrics=[keras.metrics.MeanAbsoluteError("error")])
    assert model.optimizer is optimizer
    seen = Seen()
    best = str(tmp_path / "best.keras")
    callbacks = [
        seen,
        keras.callbacks.ModelCheckpoint(best, monitor="val_loss", save_best_only=True),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=5),
    ]
    fitted = model.fit(
        X, Y, batch_size=8, epochs=4, validation_data=(X, Y), callbacks=callbacks, shuffle=False, verbose=0
    )
    history, statistics = fitted.history, rule.statistics()
    # The metrics have each example once, however often it was repeated.
    assert seen.batches == [*range(12)] * 4
    assert statistics.pushes - statistics.rejected == 48 or name == "model average"
    assert sum(statistics.clocks.values()) == 48
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    # What validation, callbacks and files have is the model after all steps of the epoch.
    np.testing.assert_allclose(history["val_loss"], seen.losses, rtol=1e-4)
    np.testing.assert_allclose(float(optimizer.learning_rate.numpy()), 0.05 * 0.9**4, rtol=1e-5)
    loaded = keras.models.load_model(best)
    assert isinstance(loaded.optimizer, keras.optimizers.SGD)
    assert min(seen.losses) == pytest.approx(loaded.evaluate(X, Y, verbose=0, return_dict=True)["loss"], rel=1e-4)


def compiled_without_statistics(optimizer: Any, **settings: Any) -> keras.Model:
    """Returns a model whose normalization has no statistics, which a repeated step would have changed again."""
    model = new_model()
    model.layers[1].trainable = False
    model.compile(optimizer(model.trainable_variables), "mse", metrics=["mae"], **settings)
    return model


def test_the_callbacks_may_be_a_callback_list_which_stays_as_it_was(
    strategy: coordinator.ParameterServerStrategy,
) -> None:
    with strategy.scope():
        model = new_model()
        rule = Synchronous(keras.optimizers.SGD(0.05), model.trainable_variables, grads_to_wait=2)
        model.compile(rule, "mse")
    seen = Seen()
    callbacks = keras.callbacks.CallbackList([seen], add_history=True, model=model)
    before = list(callbacks.callbacks)
    history = model.fit(X, Y, batch_size=8, epochs=2, validation_data=(X, Y), callbacks=callbacks, verbose=0).history
    assert callbacks.callbacks == before
    # The last update was made before validation, and before the callbacks.
    np.testing.assert_allclose(history["val_loss"], seen.losses, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_one_step_at_a_time_trains_as_one_process(
    strategy: coordinator.ParameterServerStrategy, steps_per_execution: int
) -> None:
    with strategy.scope():
        model = compiled_without_statistics(
            lambda weights: Synchronous(keras.optimizers.Adam(0.01), weights, grads_to_wait=1),
            steps_per_execution=steps_per_execution,
        )
    expected = compiled_without_statistics(lambda _: keras.optimizers.Adam(0.01))
    for first in range(0, 96, 24):
        batch = X[first : first + 24], Y[first : first + 24]
        np.testing.assert_allclose(model.train_on_batch(*batch), expected.train_on_batch(*batch), rtol=1e-4)
    for found, wanted in zip(model.trainable_variables, expected.trainable_variables, strict=True):
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-3, atol=1e-5)


@pytest.mark.long
def test_several_steps_run_in_one_call(strategy: coordinator.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = new_model()
        rule = Synchronous(keras.optimizers.SGD(0.05), model.trainable_variables, grads_to_wait=2)
        model.compile(optimizer=rule, loss="mse", steps_per_execution=3)
    history = model.fit(X, Y, batch_size=8, epochs=3, verbose=0).history
    model.fit(lambda _: tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).repeat(), steps_per_epoch=6, verbose=0)
    statistics = rule.statistics()
    assert statistics.pushes - statistics.rejected == 36 + 6
    assert history["loss"][-1] < 0.8 * history["loss"][0]


def test_what_cannot_be_trained_by_a_rule_is_refused(strategy: coordinator.ParameterServerStrategy) -> None:
    class Twice(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            super().train_step(data)
            return super().train_step(data)

    with strategy.scope():
        model = Twice([keras.Input((4,)), keras.layers.Dense(1), keras.layers.Dense(1)])
        weights = model.trainable_variables
        by_function = Asynchronous(descend, weights, learning_rate=0.1)
        of_few = Asynchronous(keras.optimizers.SGD(0.1), weights[:2])
        of_all = Asynchronous(keras.optimizers.SGD(0.1), weights)
        with pytest.raises(ValueError, match=r"this one has an update function. Call rule.pull\(\)"):
            model.compile(optimizer=by_function, loss="mse")
        model.compile(optimizer=of_all, loss="mse")
        with pytest.raises(ValueError, match="has applied the rule's optimizer 2 times"):
            model.train_on_batch(X, Y)
        half = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, dtype="mixed_float16")])
        half.dtype_policy = keras.dtype_policies.DTypePolicy("mixed_float16")
        scaled = Asynchronous(keras.optimizers.SGD(0.1), half.trainable_variables)
        half.compile(optimizer=scaled, loss="mse")
        with pytest.raises(ValueError, match=r"a rule cannot train with that.*mixed_bfloat16"):
            half.train_on_batch(X, Y)
        plain = keras.Sequential(model.layers)
        plain.compile(optimizer=of_few, loss="mse")
        with pytest.raises(ValueError, match="was created without the variable"):
            plain.train_on_batch(X, Y)
    # The optimizer is itself again.
    assert "apply" not in vars(of_all.keras_optimizer)


class OwnSteps(keras.Model):
    """Trains itself by a rule, as `docs/keras/fit.md` shows."""

    def __init__(self, *, runs: bool) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.dense.build((None, 4))
        self.error = keras.metrics.Mean("error")
        self.rule: Any = None
        self.runs = runs

    def gradients_of(self, x: Any, y: Any) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.dense(x) - y) ** 2)
        return loss, tape.gradient(loss, self.dense.trainable_variables)

    def train_step(self, data: Any) -> dict[str, Any]:
        if self.runs:
            loss = self.rule.run(self.gradients_of, *data)
        else:
            with self.rule.pull() as version:
                loss, gradients = self.gradients_of(*data)
            self.rule.push(gradients, version)
        self.error.update_state(loss)
        return {"error": self.error.result()}


@pytest.mark.parametrize("runs", mostly_long([True, False], False))
def test_a_train_step_of_ones_own_may_use_a_rule(strategy: coordinator.ParameterServerStrategy, runs: bool) -> None:
    with strategy.scope():
        model = OwnSteps(runs=runs)
        optimizer = keras.optimizers.SGD(0.05)
        kind = Synchronous(optimizer, model.dense.trainable_variables, grads_to_wait=2) if runs else None
        model.rule = kind or Asynchronous(optimizer, model.dense.trainable_variables)
        model.compile()
    fitted = model.fit(X, Y, batch_size=8, epochs=3, verbose=0)
    statistics = model.rule.statistics()
    assert statistics.pushes - statistics.rejected == 36
    assert fitted.history["error"][-1] < 0.8 * fitted.history["error"][0]
