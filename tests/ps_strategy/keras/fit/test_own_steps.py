"""Tests that `fit` trains models with their own steps as without a strategy, built or not."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import coordinator
from tests.ps_strategy.keras.fit import own_step_models as models

RNG = np.random.default_rng(5)
X = RNG.normal(size=(48, 4)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")

Compiled = Callable[[], keras.Model]


def gan(**settings: Any) -> keras.Model:
    model = models.Gan(**settings)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.01), loss)
    return model


def compiled(model_class: type[keras.Model], **arguments: Any) -> Compiled:
    def compiled_model() -> keras.Model:
        model = model_class()
        model.compile(keras.optimizers.Adam(0.01), **arguments)
        return model

    return compiled_model


CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
NARROWED = compiled(models.Narrowed, loss=CROSSENTROPY, metrics=["accuracy"])

CASES: dict[str, tuple[Compiled, tuple[Any, ...]]] = {
    "gan": (gan, (X,)),
    "several critic steps": (lambda: gan(critic_steps=3), (X,)),
    "variational autoencoder": (compiled(models.VariationalAutoencoder), (X,)),
    "contrastive": (compiled(models.Contrastive), (X, Y)),
    "distiller": (compiled(models.Distiller, metrics=["accuracy"]), (X, Y)),
    "narrowed": (NARROWED, (X, Y)),
}


def variables(model: keras.Model) -> list[Any]:
    """Returns the values of all variables, each optimizer's included, in an order that does not depend on names."""
    optimizers = [value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)]
    return [variable.numpy() for owner in (model, *optimizers) for variable in owner.variables]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_one_step_after_the_other_gives_the_same_as_without_a_strategy(
    strategy: coordinator.ParameterServerStrategy, case: str
) -> None:
    make, data = CASES[case]
    results = []
    for scope in (contextlib.nullcontext(), strategy.scope()):
        keras.utils.set_random_seed(1)
        with scope:
            model = make()
        logs = []
        for first in (0, 16, 32):
            history = model.fit(*(part[first : first + 16] for part in data), batch_size=16, shuffle=False, verbose=0)
            logs.extend(history.history.values())
        results.append((logs, variables(model)))
    for here, there in zip(*results, strict=True):
        assert len(here) == len(there)
        for one, other in zip(here, there, strict=True):
            np.testing.assert_allclose(other, one, rtol=2e-3, atol=1e-5)


@pytest.mark.long
def test_a_gan_without_call_is_trained_by_racing_workers(strategy: coordinator.ParameterServerStrategy) -> None:
    generated = []

    class Monitor(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            generated.append(self.model.generator(np.ones([2, 3])).numpy())

    with strategy.scope():
        model = gan()
    history = model.fit(X, batch_size=4, epochs=2, callbacks=[Monitor()], verbose=0).history
    assert set(history) == {"d_loss", "g_loss"}
    assert np.isfinite([*history["d_loss"], *history["g_loss"]]).all()
    assert int(model.d_optimizer.iterations) == int(model.g_optimizer.iterations) == 24
    assert not np.allclose(*generated)
    devices = {variable.value.device for variable in (*model.variables, *model.g_optimizer.variables)}
    assert devices <= set(strategy.extended.parameter_devices)


@pytest.mark.long
def test_an_own_test_step_evaluates_a_model_without_call(strategy: coordinator.ParameterServerStrategy) -> None:
    make, data = CASES["contrastive"]
    with strategy.scope():
        model = make()
    history = model.fit(*data, batch_size=4, epochs=4, validation_data=data, verbose=0).history
    assert history["c_loss"][-1] < history["c_loss"][0]
    assert len(history["val_c_loss"]) == 4
    assert np.isfinite(model.evaluate(*data, verbose=0))


@pytest.mark.long
def test_a_step_that_narrows_its_batches_builds_the_model_as_narrow(
    strategy: coordinator.ParameterServerStrategy,
) -> None:
    with strategy.scope():
        model = NARROWED()
    history = model.fit(X, Y, batch_size=8, verbose=0).history
    assert model.hidden.kernel.shape == (3, 5)
    assert set(history) == {"loss", "accuracy"}


def test_an_optimizer_beside_the_models_own_must_be_made_in_the_scope(
    strategy: coordinator.ParameterServerStrategy,
) -> None:
    outside = keras.optimizers.Adam(name="outside")
    with strategy.scope():
        model = models.Gan()
        model.compile(keras.optimizers.Adam(), outside, keras.losses.BinaryCrossentropy())
    with pytest.raises(ValueError, match="not on parameter servers, 'outside/iteration' among them"):
        model.fit(X, verbose=0)
