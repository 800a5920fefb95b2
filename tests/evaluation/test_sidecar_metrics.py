"""Tests that training acts on the results of a sidecar evaluation, each once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from coordinator.evaluation import EvaluationResult, SidecarMetrics
from coordinator.evaluation.status_files import append_result

X, Y = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)


def write(directory: Path, step: int, loss: float) -> None:
    append_result(directory, EvaluationResult(f"ckpt-{step}", step, step, {"loss": loss, "auc": 1 - loss}, 0.0))


def writing(directory: Path, losses: dict[int, list[float]]) -> keras.callbacks.Callback:
    """An evaluator: writes results before the end of each epoch."""

    def write_all(epoch: int, logs: Any) -> None:
        for loss in losses.get(epoch, []):
            write(directory, 10 * epoch, loss)

    return keras.callbacks.LambdaCallback(on_epoch_begin=write_all)


@pytest.fixture(scope="module")
def model() -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.fixture
def fit(model: keras.Model) -> Callable[..., dict[str, list[float]]]:
    model.optimizer.learning_rate.assign(0.1)

    def fit(epochs: int, *callbacks: keras.callbacks.Callback) -> dict[str, list[float]]:
        return model.fit(X, Y, batch_size=4, epochs=epochs, verbose=0, callbacks=callbacks).history

    return fit


def test_callbacks_take_each_evaluation_for_an_epoch_in_every_fit(fit, model, tmp_path: Path) -> None:
    write(tmp_path, 0, 0.0)  # of an earlier training
    losses = {0: [0.9], 2: [0.8, 0.85], 3: [0.85], 5: [0.85], 6: [0.85]}
    stop = keras.callbacks.EarlyStopping("loss", patience=4)
    slower = keras.callbacks.ReduceLROnPlateau("auc", mode="max", factor=0.5, patience=2)
    sidecar = SidecarMetrics(tmp_path, [stop, slower])
    history = fit(20, writing(tmp_path, losses), sidecar)
    assert len(history["loss"]) == 7, "it stops at the fourth evaluation in a row that is no better"
    assert stop.stopped_epoch == 5
    assert stop.best == 0.8
    assert model.optimizer.learning_rate.numpy() == pytest.approx(0.1 * 0.5**2)
    assert [result.metrics["loss"] for result in sidecar.results] == [0.9, 0.8, 0.85, 0.85, 0.85, 0.85]


def test_the_logs_of_epochs_have_the_newest_result(fit, tmp_path: Path) -> None:
    history = fit(4, writing(tmp_path, {1: [0.5, 0.4], 3: [0.3]}), SidecarMetrics(tmp_path, prefix="held_out_"))
    assert history["held_out_loss"] == [0.4, 0.4, 0.3]
    assert history["held_out_step"] == [10, 10, 30]
    assert len(history["loss"]) == 4


def test_a_second_fit_counts_from_the_beginning(fit, tmp_path: Path) -> None:
    sidecar = SidecarMetrics(tmp_path, [keras.callbacks.EarlyStopping("loss", patience=2)])
    for _ in range(2):
        history = fit(9, writing(tmp_path, {epoch: [0.5] for epoch in range(9)}), sidecar)
        assert len(history["loss"]) == len(sidecar.results) == 3
