"""Tests that training acts on the results of a sidecar evaluation, each once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from coordinator.evaluation import EvaluationResult, SidecarMetrics, best_result
from coordinator.evaluation.status_files import append_result
from tests.program_runner import COORDINATOR, ProgramRunner

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


def test_callbacks_take_each_evaluation_for_an_epoch(fit, model, tmp_path: Path) -> None:
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


PROGRAM = '''
import sys

import keras
import numpy as np
import tensorflow as tf

import coordinator
from coordinator.evaluation import SidecarMetrics, mark_training_finished, mark_training_started, results
from tests.deadline import wait_until

directory = sys.argv[1]
x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
# With 0.5, gradients that are two steps old make the bias swing and grow.
RATE = 0.2


def build_model():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(RATE), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def evaluated(step):
    """Returns once the evaluator has seen a checkpoint: what it finds must be the same in each run."""
    wait_until(lambda: (found := results(directory)) and found[-1].step == step, 200)


def fit(model, save):
    stop = keras.callbacks.EarlyStopping("loss", patience=3, min_delta=1e-3)
    slower = keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=1e-3)
    saved = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: save())
    sidecar = SidecarMetrics(directory, [stop, slower])
    # y = x is learned soon; afterwards no evaluation is better.
    history = model.fit(x, x, batch_size=8, epochs=50, verbose=0, callbacks=[saved, sidecar]).history
    assert len(history["loss"]) < 50, history
    assert float(model.optimizer.learning_rate) < RATE / 2
    assert history["sidecar_loss"][-1] < 1e-3
    assert history["sidecar_step"][-1] == int(model.optimizer.iterations)


def train(resolver):
    mark_training_started(directory)
    with coordinator.ParameterServerStrategy(resolver) as strategy:
        with strategy.scope():
            model = build_model()
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        manager = tf.train.CheckpointManager(checkpoint, directory, 3)

        def save():
            manager.save()
            evaluated(int(model.optimizer.iterations))

        fit(model, save)
        print("stopped at", int(model.optimizer.iterations), flush=True)
    mark_training_finished(directory)


resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type == "evaluator":
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(64)
    evaluator = coordinator.SidecarEvaluator(
        build_model(), data, directory, best_dir=directory + "/best", poll_interval=0.1
    )
    evaluator.start()
else:
    train(resolver)
'''


@pytest.mark.cluster
@pytest.mark.long
def test_training_ends_by_what_its_evaluator_finds(run_program: ProgramRunner, tmp_path: Path) -> None:
    program, directory = tmp_path / "program.py", tmp_path / "checkpoints"
    program.write_text(PROGRAM, encoding="utf-8")
    arguments = ["run", "--workers", 2, "--ps", 1, "--evaluator", program, directory]
    assert "stopped at " in run_program(COORDINATOR, *arguments, timeout=280).stdout
    best = best_result(directory / "best")
    assert best is not None
    assert best.metrics["loss"] < 1e-2
