"""Tests of what the evaluator evaluates and writes."""

import logging
import math
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
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
from coordinator.evaluation.checkpoint_watch import CheckpointFile
from coordinator.evaluation.sidecar_evaluator import BestCheckpoint, flat_metrics
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


def offer(best: BestCheckpoint, path: str, loss: float) -> bool:
    """Offers a checkpoint, which training deletes while it is evaluated."""
    checkpoint = CheckpointFile.of_file(path if path.endswith(".h5") else f"{path}.index")
    with best.copied(checkpoint) as copy:
        for file in checkpoint.files():
            Path(file).unlink()
        return best.offer(copy, EvaluationResult(path, 1, 10, {"loss": loss, "auc": -loss}, 0.0))


def saved_number(directory: Path) -> int:
    path = tf.train.latest_checkpoint(str(directory))
    return int(tf.train.load_checkpoint(path).get_tensor("optimizer/_iterations/.ATTRIBUTES/VARIABLE_VALUE"))


@pytest.mark.parametrize(("metric", "mode"), [("loss", "min"), ("auc", "max")])
def test_only_the_best_is_stored_also_by_one_that_was_restarted(tmp_path: Path, metric: str, mode: str) -> None:
    training = TinyTraining(tmp_path / "train")
    verdicts = [
        offer(BestCheckpoint(tmp_path / "best", metric, mode), training.save(step), loss)
        for step, loss in [(1, math.nan), (2, 0.5), (3, 0.7), (4, math.nan), (5, 0.2), (6, 0.2)]
    ]
    assert verdicts == [False, True, False, False, True, False]
    assert saved_number(tmp_path / "best") == 5
    assert best_result(tmp_path / "best").metrics["loss"] == 0.2
    assert best_result(tmp_path / "best").checkpoint == tf.train.latest_checkpoint(str(tmp_path / "best"))
    assert len(list((tmp_path / "best").iterdir())) == 4


def test_tensors_arrays_and_dicts_become_plain_numbers() -> None:
    metrics = {"loss": tf.constant(0.5), "auc": np.float32(0.25), "per_class": {"cat": 1, "dog": np.array(2.0)}}
    assert flat_metrics(metrics) == {"loss": 0.5, "auc": 0.25, "per_class/cat": 1.0, "per_class/dog": 2.0}
