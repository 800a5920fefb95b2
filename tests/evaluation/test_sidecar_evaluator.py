"""Tests of what the evaluator evaluates and writes."""

import logging
import threading
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from tensorflow.core.util import event_pb2

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
    build_data,
    build_evaluator,
    build_model,
    same_weights,
)

METRICS = {"loss", "mae", "low", "high"}


def summaries(directory: Path) -> dict[tuple[str, int], float]:
    """Returns the values of all scalars in the directory and below, by (tag, step)."""
    found = {}
    for path in directory.rglob("*tfevents*"):
        for record in tf.data.TFRecordDataset(str(path)):
            event = event_pb2.Event.FromString(record.numpy())
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    found[value.tag, event.step] = float(tf.make_ndarray(value.tensor))
    return found


def test_the_data_are_read_without_a_thread_for_autotuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TinyTraining(tmp_path).save(30)
    mark_training_finished(tmp_path)
    model, given = build_model(), []
    monkeypatch.setattr(model, "evaluate", lambda data, **_: given.append(data) or {"loss": 0.0})
    build_evaluator(tmp_path, model=model, evaluate=None).start(DEADLINE)
    assert [data.options().autotune.enabled for data in given] == [False]


# row 192
def test_it_evaluates_a_checkpoint_of_a_manager_with_the_trained_weights(tmp_path: Path) -> None:
    training, model = TinyTraining(tmp_path / "train"), build_model()
    path = training.save(30)
    mark_training_finished(tmp_path / "train")
    seen: list[EvaluationResult] = []
    settings = {"evaluate": None, "log_dir": tmp_path / "logs", "on_evaluation": seen.append}
    returned = build_evaluator(tmp_path / "train", model=model, **settings).start(DEADLINE)

    (result,) = returned
    assert (result.checkpoint, result.number, result.step) == (path, 1, 30)
    assert result.metrics == pytest.approx(training.metrics())
    assert set(result.metrics) == METRICS
    assert same_weights(model, training.model)
    assert int(model.optimizer.iterations) == 30
    assert returned == seen == results(tmp_path / "train") == [latest_result(tmp_path / "train")]
    found = summaries(tmp_path / "logs")
    assert set(found) == {(name, 30) for name in METRICS}
    assert found["loss", 30] == pytest.approx(result.metrics["loss"])


# row 193
def test_it_evaluates_the_weights_files_of_model_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "coordinator")
    trained, model = build_model(), build_model()
    saver = keras.callbacks.ModelCheckpoint(str(tmp_path / "ckpt-{epoch}.weights.h5"), save_weights_only=True)
    trained.fit(build_data(), epochs=2, verbose=0, shuffle=False, callbacks=[saver])
    board = keras.callbacks.TensorBoard(str(tmp_path / "logs"))
    (result,) = build_evaluator(tmp_path, model=model, evaluate=None, max_evaluations=2, callbacks=[board]).start(
        DEADLINE
    )
    board.on_train_end()

    assert (result.number, result.step) == (2, 4)
    assert int(model.optimizer.iterations) == 4
    assert same_weights(model, trained)
    (end,) = [record.message for record in caplog.records if record.message.startswith("End of evaluation")]
    assert all(f"{name}: {value:g}" in end for name, value in result.metrics.items())
    assert ("evaluation_loss_vs_iterations", 4) in summaries(tmp_path / "logs")


def test_a_weights_file_rewritten_in_place_is_a_new_checkpoint(tmp_path: Path) -> None:
    training, path = TinyTraining(tmp_path), str(tmp_path / "model.weights.h5")
    evaluated = threading.Event()
    evaluator = build_evaluator(tmp_path, on_evaluation=lambda _: evaluated.set())
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


# row 196
def test_the_best_checkpoint_is_stored(tmp_path: Path) -> None:
    training, losses = TinyTraining(tmp_path / "train", keep=1), {10: 0.5, 20: 0.3, 30: 0.4}
    evaluated = threading.Event()
    evaluator = build_evaluator(
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
    model = build_model()
    build_evaluator(tmp_path / "best", model=model, max_evaluations=1).start(DEADLINE)
    training.train_to(20)
    assert same_weights(model, training.model)


def test_all_directories_may_be_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    # With a host, it is a URL that TensorFlow alone understands.
    train, best, logs = (f"file://localhost{tmp_path}/{name}" for name in ("train", "best", "logs"))
    training = TinyTraining(train)
    evaluator = build_evaluator(train, best_dir=best, log_dir=logs)
    for step in (10, 20):
        training.save(step)
        mark_training_finished(train)
        evaluator.start(DEADLINE)
    assert [result.step for result in results(train)] == [10, 20]
    assert (best_result(best).step, tf.train.latest_checkpoint(best)) == (10, f"{best}/best-1")
    assert summaries(tmp_path / "logs") == {("loss", 10): 10.0, ("loss", 20): 20.0}
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("train", "best", "logs")] == ["here"]
    assert not list(Path().iterdir())


# row 196
def test_a_callback_can_export_the_best_model_after_a_limited_number_of_batches(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Export(keras.callbacks.Callback):
        batches, best = 0, float("inf")

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            self.batches += 1

        def on_test_end(self, logs: Any = None) -> None:
            if logs["loss"] < self.best:
                self.best = logs["loss"]
                self.model.save(tmp_path / "best.keras")

    training, export = TinyTraining(tmp_path / "train"), Export()
    training.save(1)
    capfd.readouterr()
    evaluator = build_evaluator(tmp_path / "train", evaluate=None, steps=1, max_evaluations=1, callbacks=[export])
    evaluator.start(DEADLINE)
    assert capfd.readouterr().out == ""
    assert export.batches == 1
    exported = keras.saving.load_model(tmp_path / "best.keras", compile=False)
    assert same_weights(exported, training.model)
