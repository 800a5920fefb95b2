"""Tests of the evaluator with unreadable checkpoints, wrong models, failing functions and invalid settings."""

import os
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from coordinator import SidecarEvaluator
from coordinator.errors import EvaluationError
from coordinator.evaluation import (
    latest_result,
    mark_training_finished,
    results,
)
from tests.evaluation.tiny_training import (
    DEADLINE,
    Background,
    Logged,
    TinyTraining,
    build_data,
    build_evaluator,
    build_model,
    set_written,
)


# row 197
@pytest.mark.parametrize("suffix", [".index", ".data-00000-of-00001"])
def test_an_unreadable_checkpoint_is_retried_until_there_is_a_newer_one(tmp_path: Path, suffix: str) -> None:
    training = TinyTraining(tmp_path)
    damaged = Path(training.save(1) + suffix)
    os.truncate(damaged, damaged.stat().st_size // 2)
    with Logged("will try again") as log:
        evaluator = build_evaluator(tmp_path, max_evaluations=2)
        running = Background(lambda: evaluator.start(DEADLINE))
        log.wait_seen()
        training.save(2)
        assert [result.step for result in running.result()] == [2]
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


def test_a_checkpoint_replaced_during_its_load_is_evaluated_once_as_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, writes = tf.train.load_checkpoint, iter([10.0])
    path = TinyTraining(tmp_path).save(1)

    def load_late(prefix: str) -> Any:
        for seconds in writes:
            set_written(f"{path}.index", seconds)
        return opened(prefix)

    monkeypatch.setattr(tf.train, "load_checkpoint", load_late)
    evaluated = build_evaluator(tmp_path, max_evaluations=1).start(DEADLINE)
    assert len(evaluated) == len(results(tmp_path)) == 1
    assert evaluated[0].written_ns == os.stat(f"{path}.index").st_mtime_ns


def test_a_last_checkpoint_that_stays_unreadable_is_an_error(tmp_path: Path) -> None:
    damaged = Path(TinyTraining(tmp_path).save(1) + ".index")
    os.truncate(damaged, 10)
    mark_training_finished(tmp_path)
    with pytest.raises(EvaluationError, match=r"ckpt-1' could not be read for 0.2 s"):
        build_evaluator(tmp_path, advice_after=0.2).start(DEADLINE)


# row 197
def test_a_lost_server_is_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TinyTraining(tmp_path).save(1)

    def unavailable(prefix: str) -> None:
        raise tf.errors.UnavailableError(None, None, "Socket closed")

    monkeypatch.setattr(tf.train, "load_checkpoint", unavailable)
    with pytest.raises(tf.errors.UnavailableError, match="Socket closed"):
        build_evaluator(tmp_path).start(DEADLINE)


def test_a_checkpoint_that_does_not_fit_is_an_error_with_the_reason(tmp_path: Path) -> None:
    TinyTraining(tmp_path).save(1)
    with pytest.raises(EvaluationError, match=r"kernel' has shape \(4, 5\) in the evaluator and \(4, 3\)"):
        build_evaluator(tmp_path, model=build_model(units=5)).start(DEADLINE)
    assert results(tmp_path) == []


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


def test_an_uncompiled_model_is_refused_before_the_first_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="not compiled"):
        build_evaluator(tmp_path, model=build_model(compiled=False), evaluate=None).start(DEADLINE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"max_evaluations": 0}, "max_evaluations"),
        ({"poll_interval": 0.0}, "poll_interval"),
        ({"advice_after": -1.0}, "advice_after"),
        ({"new_training_grace": -1.0}, "new_training_grace"),
        ({"best_dir": "train", "best_mode": "least"}, "best_mode"),
        ({"steps": 3}, "model.evaluate"),
        ({"batch_size": 3}, "model.evaluate"),
        ({"model": tf.Module(), "evaluate": None}, "as evaluate="),
    ],
)
def test_invalid_settings_are_refused_by_the_constructor(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_evaluator(tmp_path, **settings)


def test_endless_data_need_a_number_of_steps(tmp_path: Path) -> None:
    data = build_data().repeat()
    with pytest.raises(ValueError, match="Give steps="):
        SidecarEvaluator(build_model(), data, tmp_path)
    SidecarEvaluator(build_model(), data, tmp_path, steps=1)


def test_the_best_checkpoint_needs_a_separate_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="best_dir must be another directory"):
        build_evaluator(tmp_path / "train", best_dir=tmp_path / "train" / ".." / "train")
