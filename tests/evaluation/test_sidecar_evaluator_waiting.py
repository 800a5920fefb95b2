"""Tests of when the evaluator ends and when it waits, and of what it does with what cannot be read or is wrong."""

import logging
import os
import threading
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from coordinator.errors import EvaluationError
from coordinator.evaluation import (
    latest_result,
    mark_training_finished,
    mark_training_started,
    results,
)
from tests.evaluation.tiny_training import (
    DEADLINE,
    Background,
    Logged,
    TinyTraining,
    build_evaluator,
)


def test_it_evaluates_new_checkpoints_until_training_has_finished(tmp_path: Path) -> None:
    training, directory = TinyTraining(tmp_path / "created" / "later"), tmp_path / "created" / "later"
    evaluated = threading.Event()
    evaluator = build_evaluator(directory, on_evaluation=lambda _: evaluated.set())
    running = Background(lambda: evaluator.start(DEADLINE))
    mark_training_started(directory)
    for step in (10, 20, 30):
        training.save(step)
        if step < 30:
            assert evaluated.wait(DEADLINE)
            evaluated.clear()
    mark_training_finished(directory)
    assert [result.step for result in running.result()] == [10, 20, 30]
    # One that is restarted repeats nothing.
    assert build_evaluator(directory).start(DEADLINE) == []
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
    evaluated = threading.Event()
    evaluator = build_evaluator(tmp_path, new_training_grace=DEADLINE, on_evaluation=lambda _: evaluated.set())
    running = Background(lambda: evaluator.start(DEADLINE))
    assert evaluated.wait(DEADLINE)
    mark_training_started(tmp_path)
    evaluated.clear()
    TinyTraining(tmp_path).save(2)
    assert evaluated.wait(DEADLINE)
    mark_training_finished(tmp_path)
    assert [result.step for result in running.result()] == [1, 2]


# row 194
def test_a_long_wait_for_a_first_checkpoint_logs_advice_and_continues(tmp_path: Path) -> None:
    directory = tmp_path / "nowhere"
    with Logged("Does training write its checkpoints to this directory") as log:
        evaluator = build_evaluator(directory, advice_after=0.1, max_evaluations=1)
        running = Background(lambda: evaluator.start(DEADLINE))
        log.wait_seen()
        TinyTraining(directory).save(1)
        assert len(running.result()) == 1
    assert str(directory) in log.messages[0]


@pytest.mark.parametrize("by_event", [True, False])
def test_the_stop_event_and_stop_end_a_wait_at_once(
    tmp_path: Path, by_event: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "coordinator")
    stop = threading.Event()
    evaluator = build_evaluator(tmp_path, stop=stop, poll_interval=100 * DEADLINE)
    with Logged("waiting for a first checkpoint") as log:
        running = Background(lambda: evaluator.start(100 * DEADLINE))
        log.wait_seen()
    (stop.set if by_event else evaluator.stop)()
    assert running.result(DEADLINE) == []


# row 197
def test_an_unreadable_checkpoint_is_retried_until_there_is_a_newer_one(tmp_path: Path) -> None:
    training = TinyTraining(tmp_path)
    damaged = Path(training.save(1) + ".index")
    os.truncate(damaged, damaged.stat().st_size // 2)
    with Logged("will try again") as log:
        evaluator = build_evaluator(tmp_path, max_evaluations=2)
        running = Background(lambda: evaluator.start(DEADLINE))
        log.wait_seen()
        training.save(2)
        assert [result.step for result in running.result()] == [2]
    os.truncate(training.save(3) + ".index", 10)
    mark_training_finished(tmp_path)
    with pytest.raises(EvaluationError, match=r"ckpt-3' could not be read for 0.01 s"):
        build_evaluator(tmp_path, advice_after=0.01).start(DEADLINE)
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
    TinyTraining(tmp_path).save(1)

    def unavailable(prefix: str) -> None:
        raise tf.errors.UnavailableError(None, None, "Socket closed")

    monkeypatch.setattr(tf.train, "load_checkpoint", unavailable)
    with pytest.raises(tf.errors.UnavailableError, match="Socket closed"):
        build_evaluator(tmp_path).start(DEADLINE)


def test_an_error_of_the_users_function_is_raised_and_nothing_is_recorded(tmp_path: Path) -> None:
    def fail(step: int) -> dict[str, float]:
        raise FileNotFoundError("the evaluation data")

    TinyTraining(tmp_path).save(1)
    with pytest.raises(FileNotFoundError, match="the evaluation data"):
        build_evaluator(tmp_path, evaluate=fail).start(DEADLINE)
    assert latest_result(tmp_path) is None


# row 191
def test_a_model_without_weights_is_refused_before_the_first_checkpoint(tmp_path: Path) -> None:
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(RuntimeError, match="Nothing to load"):
        build_evaluator(tmp_path, model=model).start(DEADLINE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_evaluations": 0}, "max_evaluations"),
        ({"poll_interval": 0.0}, "poll_interval"),
        ({"best_dir": "best", "best_mode": "least"}, "best_mode"),
        ({"best_dir": "train/../train"}, "best_dir must be another directory"),
        ({"steps": 3}, "model.evaluate"),
        ({"model": tf.Module(), "evaluate": None}, "as evaluate="),
    ],
)
def test_invalid_settings_are_refused_by_the_constructor(
    tmp_path: Path, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        build_evaluator(Path("train"), **settings)
