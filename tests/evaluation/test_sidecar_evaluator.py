"""Tests of what the evaluator evaluates and writes, when it waits and ends, and what it does with what is wrong."""

import logging
import math
import os
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.util import event_pb2

from coordinator import SidecarEvaluator
from coordinator.errors import EvaluationError
from coordinator.evaluation import (
    EvaluationResult,
    best_result,
    latest_result,
    mark_training_finished,
    mark_training_started,
    results,
)
from coordinator.evaluation.checkpoint_watch import SETTLING_TIME, CheckpointFile
from coordinator.evaluation.sidecar_evaluator import BestCheckpoint
from tests.evaluation.tiny_training import (
    DEADLINE,
    Logged,
    TinyTraining,
    build_data,
    build_evaluator,
    build_model,
    in_turn,
    same_weights,
)
from tests.virtual_clock import VirtualClock

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
def test_it_evaluates_the_weights_files_of_model_checkpoint(
    tmp_path: Path, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "coordinator")
    trained, model = build_model(), build_model()
    saver = keras.callbacks.ModelCheckpoint(str(tmp_path / "ckpt-{epoch}.weights.h5"), save_weights_only=True)
    trained.fit(build_data(), epochs=2, verbose=0, shuffle=False, callbacks=[saver])
    board = keras.callbacks.TensorBoard(str(tmp_path / "logs"))
    (result,) = build_evaluator(tmp_path, model=model, evaluate=None, max_evaluations=2, callbacks=[board]).start(
        DEADLINE
    )
    board.on_train_end()
    assert clock.now() == SETTLING_TIME
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
        evaluate=lambda step: {"loss": module.weight, "by": {"step": np.array(step)}},
        log_dir=tmp_path / "logs",
    )
    (result,) = evaluator.start(DEADLINE)
    assert (result.step, result.metrics) == (70, {"loss": 5.0, "by/step": 70.0})
    assert summaries(tmp_path / "logs") == {("loss", 70): 5.0, ("by/step", 70): 70.0}


# row 196
def test_the_best_checkpoint_is_stored(tmp_path: Path) -> None:
    training, losses = TinyTraining(tmp_path / "train", keep=1), {10: 0.5, 20: 0.3, 30: 0.4}
    training.save(10)
    build_evaluator(
        tmp_path / "train",
        evaluate=lambda step: {"score": losses[step]},
        best_dir=tmp_path / "best",
        best_metric="score",
        on_evaluation=in_turn(lambda: training.save(20), lambda: training.save(30)),
        max_evaluations=3,
    ).start(DEADLINE)
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
    batches: list[int] = []
    export = keras.callbacks.Callback()
    export.on_test_batch_end = lambda batch, logs: batches.append(batch)
    export.on_test_end = lambda logs: export.model.save(tmp_path / "best.keras")
    training = TinyTraining(tmp_path / "train")
    training.save(1)
    capfd.readouterr()
    evaluator = build_evaluator(tmp_path / "train", evaluate=None, steps=1, max_evaluations=1, callbacks=[export])
    evaluator.start(DEADLINE)
    assert capfd.readouterr().out == ""
    assert batches == [0]
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


def test_it_evaluates_new_checkpoints_until_training_has_finished(tmp_path: Path, clock: VirtualClock) -> None:
    training, directory = TinyTraining(tmp_path / "created" / "later"), tmp_path / "created" / "later"
    mark_training_started(directory)
    training.save(10)
    saves = (lambda: training.save(20), lambda: (training.save(30), mark_training_finished(directory)))
    evaluator = build_evaluator(directory, on_evaluation=in_turn(*saves))
    assert [result.step for result in evaluator.start(DEADLINE)] == [10, 20, 30]
    assert clock.now() == 0.0
    # One that is restarted repeats nothing, and waits a while for a new training.
    assert build_evaluator(directory, new_training_grace=4.0).start(DEADLINE) == []
    assert clock.now() == 4.0
    training.save(40)
    mark_training_finished(directory)
    assert [result.step for result in build_evaluator(directory).start(DEADLINE)] == [40]
    assert [result.step for result in results(directory)] == [10, 20, 30, 40]


# row 197
def test_it_ends_after_max_evaluations_even_if_checkpoints_were_skipped(tmp_path: Path) -> None:
    training = TinyTraining(tmp_path)
    for step in (1, 2, 3):
        training.save(step)
    evaluated = build_evaluator(tmp_path, max_evaluations=2).start(DEADLINE)
    assert [result.number for result in evaluated] == [3]


def test_an_old_marker_does_not_end_an_evaluator_before_a_new_training_starts(tmp_path: Path) -> None:
    TinyTraining(tmp_path).save(1)
    mark_training_finished(tmp_path)

    def train_again() -> None:
        mark_training_started(tmp_path)
        TinyTraining(tmp_path).save(2)

    new = in_turn(train_again, lambda: mark_training_finished(tmp_path))
    evaluated = build_evaluator(tmp_path, new_training_grace=DEADLINE, on_evaluation=new).start(DEADLINE)
    assert [result.step for result in evaluated] == [1, 2]


# row 194
def test_a_long_wait_for_a_first_checkpoint_logs_advice_and_continues(tmp_path: Path, clock: VirtualClock) -> None:
    directory = tmp_path / "nowhere"
    advice = "Does training write its checkpoints to this directory"
    evaluator = build_evaluator(directory, max_evaluations=1)
    with Logged(advice, int) as log, pytest.raises(TimeoutError, match="waiting for a first checkpoint in"):
        evaluator.start(90.5)
    assert clock.now() == 90.5
    for message, seconds in zip(log.messages, (30, 60, 90), strict=True):
        assert f"has been waiting for {seconds} s for a first checkpoint in '{directory}'." in message
    with Logged(advice, lambda: TinyTraining(directory).save(1)):
        assert len(evaluator.start(DEADLINE)) == 1


def test_the_stop_event_and_stop_end_a_wait_at_once(
    tmp_path: Path, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "coordinator")
    for by_event in (True, False):
        stop = threading.Event()
        evaluator = build_evaluator(tmp_path, stop=stop)
        with Logged("waiting for a first checkpoint", stop.set if by_event else evaluator.stop):
            assert evaluator.start(DEADLINE) == []
    assert clock.now() == 0.0


# row 197
def test_an_unreadable_checkpoint_is_retried_until_there_is_a_newer_one(tmp_path: Path, clock: VirtualClock) -> None:
    training = TinyTraining(tmp_path)
    damaged = Path(training.save(1) + ".index")
    os.truncate(damaged, damaged.stat().st_size // 2)
    with Logged("will try again", lambda: training.save(2)) as log:
        assert [result.step for result in build_evaluator(tmp_path, max_evaluations=2).start(DEADLINE)] == [2]
    os.truncate(training.save(3) + ".index", 10)
    mark_training_finished(tmp_path)
    begin = clock.now()
    with pytest.raises(EvaluationError, match=r"ckpt-3' could not be read for 15 s"):
        build_evaluator(tmp_path, advice_after=15.0).start(DEADLINE)
    assert clock.now() - begin == 15.0
    assert len([message for message in log.messages if "ckpt-1" in message]) == 1


# row 197
def test_a_checkpoint_deleted_during_its_load_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, opened = TinyTraining(tmp_path), tf.train.load_checkpoint
    path = training.save(1)

    def load_late(prefix: str) -> Any:
        if os.path.exists(f"{path}.index"):
            os.unlink(f"{path}.index")
            training.save(2)
        return opened(prefix)

    monkeypatch.setattr(tf.train, "load_checkpoint", load_late)
    evaluated = build_evaluator(tmp_path, max_evaluations=2).start(DEADLINE)
    assert [result.step for result in evaluated] == [2]


# row 197
def test_a_lost_server_is_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(error: Exception) -> Any:
        def fail(_: Any) -> Any:
            raise error

        return fail

    TinyTraining(tmp_path).save(1)
    # Nor is an error of the user's function.
    with pytest.raises(FileNotFoundError, match="the evaluation data"):
        build_evaluator(tmp_path, evaluate=raising(FileNotFoundError("the evaluation data"))).start(DEADLINE)
    monkeypatch.setattr(tf.train, "load_checkpoint", raising(tf.errors.UnavailableError(None, None, "Socket closed")))
    with pytest.raises(tf.errors.UnavailableError, match="Socket closed"):
        build_evaluator(tmp_path).start(DEADLINE)
    assert latest_result(tmp_path) is None


# row 191
def test_a_model_without_weights_is_refused_before_the_first_checkpoint(tmp_path: Path) -> None:
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(RuntimeError, match="Nothing to load"):
        build_evaluator(tmp_path, model=model).start(DEADLINE)


def test_invalid_settings_are_refused_by_the_constructor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"max_evaluations": 0}, "max_evaluations"),
        ({"poll_interval": 0.0}, "poll_interval"),
        ({"best_dir": "best", "best_mode": "least"}, "best_mode"),
        ({"best_dir": "train/../train"}, "best_dir must be another directory"),
        ({"steps": 3}, "model.evaluate"),
        ({"model": tf.Module(), "evaluate": None}, "as evaluate="),
    ]
    for settings, message in cases:
        with pytest.raises(ValueError, match=message):
            build_evaluator(Path("train"), **settings)
