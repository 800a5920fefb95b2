"""Tests that `fit` trains models that are compiled with an update rule, as without one, with all callbacks."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.updates import Asynchronous, ModelAverage, StaleSynchronous, Synchronous
from tests.updates.descent import descend

# Keras reads learning rates in a way that NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

RNG = np.random.default_rng(5)
X = RNG.normal(size=(96, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)

RULES = {
    "stale synchronous": lambda *model: StaleSynchronous(*model, get_model_frequency=2, max_lead=2),
    "model average": ModelAverage,
}


def new_model() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.layers[0].kernel.assign(np.ones([4, 1]) / 3)
    return model


class Seen(keras.callbacks.Callback):
    """Lists the batches, and evaluates the model after each epoch, when no step of a rule may be left."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.losses.append(self.model.evaluate(X, Y, batch_size=96, verbose=0, return_dict=True)["loss"])


def compiled(make: Any, optimizer: keras.optimizers.Optimizer) -> tuple[keras.Model, Any]:
    """Returns a model that is compiled with what `make` returns for the optimizer and the variables, and that."""
    model = new_model()
    rule = make(optimizer, model.trainable_variables)
    model.compile(optimizer=rule, loss="mse")
    return model, rule


def test_fit_trains_by_the_rule_to_the_end_of_each_epoch(strategy: coordinator.ParameterServerStrategy) -> None:
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.05)
        model, rule = compiled(lambda *given: Synchronous(*given, grads_to_wait=2), optimizer)
    assert model.optimizer is optimizer
    history = model.fit(X, Y, batch_size=16, epochs=2, validation_data=(X, Y), verbose=0).history
    statistics = rule.statistics()
    assert (statistics.pushes - statistics.rejected, sum(statistics.clocks.values())) == (12, 12)
    assert history["loss"][-1] < history["loss"][0]
    # What validation has is the model after all steps of the epoch.
    kernel, bias = model.get_weights()
    left = X @ kernel + bias - Y
    assert history["val_loss"][-1] == pytest.approx(np.mean(left**2), rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("name", RULES)
def test_fit_trains_by_the_rule_with_all_callbacks(
    strategy: coordinator.ParameterServerStrategy, name: str, tmp_path: Any
) -> None:
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.05)
        model, rule = compiled(RULES[name], optimizer)
    seen, best = Seen(), str(tmp_path / "best.keras")
    callbacks = [
        seen,
        keras.callbacks.ModelCheckpoint(best, monitor="val_loss", save_best_only=True),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
    ]
    listed = keras.callbacks.CallbackList(callbacks, add_history=True, model=model)
    before = list(listed.callbacks)
    history = model.fit(
        X, Y, batch_size=8, epochs=2, validation_data=(X, Y), callbacks=listed, shuffle=False, verbose=0
    ).history
    statistics = rule.statistics()
    assert listed.callbacks == before
    # The metrics have each example once, however often it was repeated.
    assert seen.batches == [*range(12)] * 2
    assert sum(statistics.clocks.values()) == 24
    assert history["loss"][-1] < history["loss"][0]
    # What validation, callbacks and files have is the model after all steps of the epoch.
    np.testing.assert_allclose(history["val_loss"], seen.losses, rtol=1e-4)
    np.testing.assert_allclose(float(optimizer.learning_rate.numpy()), 0.05 * 0.9**2, rtol=1e-5)
    loaded = keras.models.load_model(best)
    assert isinstance(loaded.optimizer, keras.optimizers.SGD)
    assert min(seen.losses) == pytest.approx(loaded.evaluate(X, Y, verbose=0, return_dict=True)["loss"], rel=1e-4)


@pytest.mark.long
def test_one_step_at_a_time_trains_as_one_process(strategy: coordinator.ParameterServerStrategy) -> None:
    with strategy.scope():
        model, _ = compiled(lambda *given: Synchronous(*given, grads_to_wait=1), keras.optimizers.Adam(0.01))
    expected, _ = compiled(lambda optimizer, _: optimizer, keras.optimizers.Adam(0.01))
    for first in range(0, 96, 24):
        batch = X[first : first + 24], Y[first : first + 24]
        np.testing.assert_allclose(model.train_on_batch(*batch), expected.train_on_batch(*batch), rtol=1e-4)
    for found, wanted in zip(model.trainable_variables, expected.trainable_variables, strict=True):
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-3, atol=1e-5)


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
        half = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, dtype="mixed_float16")])
        half.dtype_policy = keras.dtype_policies.DTypePolicy("mixed_float16")
        half.compile(Asynchronous(keras.optimizers.SGD(0.1), half.trainable_variables), "mse")
        plain = keras.Sequential(model.layers)
        plain.compile(optimizer=of_few, loss="mse")
        for refused, words in (
            (model, "has applied the rule's optimizer 2 times"),
            (half, r"a rule cannot train with that.*mixed_bfloat16"),
            (plain, "was created without the variable"),
        ):
            with pytest.raises(ValueError, match=words):
                refused.train_on_batch(X, Y)
    # The optimizer is itself again.
    assert "apply" not in vars(of_all.keras_optimizer)


class OwnSteps(keras.Model):
    """Trains itself by a rule, as `docs/keras/fit.md` shows."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.dense.build((None, 4))
        self.error = keras.metrics.Mean("error")
        self.rule = Asynchronous(keras.optimizers.SGD(0.05), self.dense.trainable_variables)
        self.compile()

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with self.rule.pull() as version, tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.dense(x) - y) ** 2)
        self.rule.push(tape.gradient(loss, self.dense.trainable_variables), version)
        self.error.update_state(loss)
        return {"error": self.error.result()}


@pytest.mark.long
def test_a_train_step_of_ones_own_may_use_a_rule(strategy: coordinator.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = OwnSteps()
    errors = model.fit(X, Y, batch_size=8, epochs=3, verbose=0).history["error"]
    assert model.rule.statistics().pushes == 36
    assert errors[-1] < errors[0]
