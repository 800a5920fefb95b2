"""The evaluator as a whole: what it evaluates, and what it leaves behind."""

import logging
import threading
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from tensorflow.core.util import event_pb2

import coordinator
from coordinator import SidecarEvaluator
from coordinator.evaluation import (
    EvaluationResult,
    best_result,
    latest_result,
    mark_training_finished,
    results,
)
from tests.evaluation.tiny_training import (
    DEADLINE,
    Background,
    TinyTraining,
    made_data,
    made_evaluator,
    made_model,
    same_weights,
)

METRICS = {"loss", "mae", "low", "high"}


def summaries(directory: Path) -> dict[tuple[str, int], float]:
    """(tag, step) to value of all scalars in the directory, subdirectories included."""
    found = {}
    for path in directory.rglob("*tfevents*"):
        for record in tf.data.TFRecordDataset(str(path)):
            event = event_pb2.Event.FromString(record.numpy())
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    found[value.tag, event.step] = float(tf.make_ndarray(value.tensor))
    return found


# row 192
def test_it_evaluates_a_checkpoint_of_a_manager_with_the_trained_weights(tmp_path: Path) -> None:
    training, model = TinyTraining(tmp_path / "train"), made_model()
    path = training.save(30)
    mark_training_finished(tmp_path / "train")
    seen: list[EvaluationResult] = []
    made = made_evaluator(tmp_path / "train", model=model, log_dir=tmp_path / "logs", on_evaluation=seen.append).start(
        DEADLINE
    )

    (result,) = made
    assert (result.checkpoint, result.number, result.step) == (path, 1, 30)
    assert result.metrics == pytest.approx(training.metrics())
    assert set(result.metrics) == METRICS
    assert same_weights(model, training.model)
    assert int(model.optimizer.iterations) == 30
    assert made == seen == results(tmp_path / "train") == [latest_result(tmp_path / "train")]
    written = summaries(tmp_path / "logs")
    assert set(written) == {(name, 30) for name in METRICS}
    assert written["loss", 30] == pytest.approx(result.metrics["loss"])


# row 193
def test_it_evaluates_the_weights_files_of_model_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "coordinator")
    trained, model = made_model(), made_model()
    saver = keras.callbacks.ModelCheckpoint(str(tmp_path / "ckpt-{epoch}.weights.h5"), save_weights_only=True)
    trained.fit(made_data(), epochs=2, verbose=0, shuffle=False, callbacks=[saver])
    board = keras.callbacks.TensorBoard(str(tmp_path / "logs"))
    (result,) = made_evaluator(tmp_path, model=model, max_evaluations=2, callbacks=[board]).start(DEADLINE)
    board.on_train_end()

    assert (result.number, result.step) == (2, 4)
    assert int(model.optimizer.iterations) == 4
    assert same_weights(model, trained)
    (end,) = [record.message for record in caplog.records if record.message.startswith("End of evaluation")]
    assert all(f"{name}: {value:g}" in end for name, value in result.metrics.items())
    assert ("evaluation_loss_vs_iterations", 4) in summaries(tmp_path / "logs")


def test_a_weights_file_written_again_in_its_place_is_a_new_checkpoint(tmp_path: Path) -> None:
    training, path = TinyTraining(tmp_path), str(tmp_path / "model.weights.h5")
    evaluated = threading.Event()
    evaluator = made_evaluator(tmp_path, on_evaluation=lambda _: evaluated.set())
    running = Background(lambda: evaluator.start(DEADLINE))
    for step in (10, 20):
        training.train_to(step)
        training.model.save_weights(path)
        assert evaluated.wait(DEADLINE)
        evaluated.clear()
    mark_training_finished(tmp_path)
    assert [(result.number, result.step) for result in running.result()] == [(1, 10), (2, 20)]


def test_a_module_is_evaluated_by_a_function_of_the_user(tmp_path: Path) -> None:
    trained, module = tf.Module(), tf.Module()
    trained.weight, module.weight = tf.Variable(5.0), tf.Variable(0.0)
    tf.train.Checkpoint(model=trained, step=tf.Variable(70)).save(str(tmp_path / "ckpt"))
    mark_training_finished(tmp_path)
    evaluator = SidecarEvaluator(
        module,
        None,
        tmp_path,
        evaluate=lambda step: {"loss": module.weight, "by": {"step": step}},
        log_dir=tmp_path / "logs",
        new_training_grace=0.0,
    )
    (result,) = evaluator.start(DEADLINE)
    assert (result.step, result.metrics) == (70, {"loss": 5.0, "by/step": 70.0})
    assert summaries(tmp_path / "logs") == {("loss", 70): 5.0, ("by/step", 70): 70.0}


def test_steps_bound_the_batches_of_an_evaluation(tmp_path: Path) -> None:
    class Batches(keras.callbacks.Callback):
        count = 0

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            self.count += 1

    TinyTraining(tmp_path).save(1)
    batches = Batches()
    made_evaluator(tmp_path, steps=1, max_evaluations=1, callbacks=[batches]).start(DEADLINE)
    assert batches.count == 1


# row 196
def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    training, losses = TinyTraining(tmp_path / "train", keep=1), {10: 0.5, 20: 0.3, 30: 0.4}
    evaluated = threading.Event()
    evaluator = made_evaluator(
        tmp_path / "train",
        evaluate=lambda step: {"score": losses[step]},
        best_dir=tmp_path / "best",
        best_metric="score",
        on_evaluation=lambda _: evaluated.set(),
        max_evaluations=3,
    )
    running = Background(lambda: evaluator.start(DEADLINE))
    for step in losses:
        training.save(step)
        assert evaluated.wait(DEADLINE)
        evaluated.clear()
    running.result()
    best = best_result(tmp_path / "best")
    assert (best.step, best.metrics) == (20, {"score": 0.3})
    model = made_model()
    made_evaluator(tmp_path / "best", model=model, max_evaluations=1).start(DEADLINE)
    training.train_to(20)
    assert same_weights(model, training.model)


# row 196
def test_a_callback_may_export_the_best_model(tmp_path: Path) -> None:
    class Export(keras.callbacks.Callback):
        best = float("inf")

        def on_test_end(self, logs: Any = None) -> None:
            if logs["loss"] < self.best:
                self.best = logs["loss"]
                self.model.save(tmp_path / "best.keras")

    training = TinyTraining(tmp_path / "train")
    training.save(1)
    made_evaluator(tmp_path / "train", max_evaluations=1, callbacks=[Export()]).start(DEADLINE)
    exported = keras.saving.load_model(tmp_path / "best.keras", compile=False)
    assert same_weights(exported, training.model)


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    TinyTraining(tmp_path).save(1)
    capfd.readouterr()
    made_evaluator(tmp_path, max_evaluations=1).start(DEADLINE)
    assert capfd.readouterr().out == ""


def test_it_is_a_public_name() -> None:
    assert coordinator.SidecarEvaluator is SidecarEvaluator
