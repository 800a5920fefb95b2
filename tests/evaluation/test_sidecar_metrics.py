"""Tests that training acts on the results of a sidecar evaluation, each once."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from coordinator.evaluation import EvaluationResult, SidecarMetrics
from coordinator.evaluation.status_files import append_result
from tests.virtual_clock import VirtualClock

X, Y = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)


def write(directory: Path, step: int, loss: float) -> None:
    append_result(directory, EvaluationResult(f"ckpt-{step}", step, step, {"loss": loss, "auc": 1 - loss}, 0.0))


def writing(directory: Path, losses: dict[int, list[float]]) -> keras.callbacks.Callback:
    """An evaluator: writes results before the end of each epoch."""

    def write_all(epoch: int, logs: Any) -> None:
        for loss in losses.get(epoch, []):
            write(directory, 10 * epoch, loss)

    return keras.callbacks.LambdaCallback(on_epoch_begin=write_all)


def test_callbacks_take_each_evaluation_for_an_epoch_in_every_fit(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    write(tmp_path, 0, 0.0)  # of an earlier training
    losses = {0: [0.9], 2: [0.8, 0.85], 3: [0.85], 5: [0.85], 6: [0.85]}
    for fits in (1, 2):
        stop = keras.callbacks.EarlyStopping("loss", patience=4)
        slower = keras.callbacks.ReduceLROnPlateau("auc", mode="max", factor=0.5, patience=2)
        sidecar = SidecarMetrics(tmp_path, [stop, slower])
        callbacks = [writing(tmp_path, losses), sidecar]
        history = model.fit(X, Y, batch_size=4, epochs=20, verbose=0, callbacks=callbacks).history
        assert len(history["loss"]) == 7, "it stops at the fourth evaluation in a row that is no better"
        assert history["sidecar_loss"] == [0.9, 0.9, *[0.85] * 5]
        assert stop.stopped_epoch == 5
        assert stop.best == 0.8
        assert model.optimizer.learning_rate.numpy() == pytest.approx(0.1 * 0.5 ** (2 * fits))
        assert [result.metrics["loss"] for result in sidecar.results] == [0.9, 0.8, 0.85, 0.85, 0.85, 0.85]
    sidecar.on_train_begin()
    assert sidecar.results == []


def test_results_come_once_an_interval_and_the_logs_of_an_epoch_have_the_newest(
    tmp_path: Path, clock: VirtualClock
) -> None:
    sidecar, logs = SidecarMetrics(tmp_path, prefix="held_out_"), {"loss": 2.0}
    sidecar.on_train_begin()
    sidecar.on_epoch_end(0, logs)
    assert logs == {"loss": 2.0}
    for step, seconds, steps in ((10, 0.75, []), (20, 0.25, [10, 20]), (30, 0.75, [10, 20])):
        write(tmp_path, step, 0.25)
        clock.advance(seconds)
        sidecar.on_train_batch_end(step)
        assert [result.step for result in sidecar.results] == steps
    sidecar.on_epoch_end(1, logs)
    assert logs == {"loss": 2.0, "held_out_step": 30, "held_out_loss": 0.25, "held_out_auc": 0.75}
