import dataclasses
import logging
import threading
import time
from pathlib import Path

import pytest

from coordinator.evaluation import EvaluationResult
from coordinator.evaluation.checkpoint_watch import CheckpointFile, CheckpointWatch, Move, Situation, advice, next_move
from coordinator.evaluation.status_files import TrainingMarker, append_result
from tests.evaluation.tiny_training import DEADLINE, set_written

CHECKPOINT = CheckpointFile("/runs/ckpt-3", 100)
RESULT = EvaluationResult("/runs/ckpt-3", 3, 30, {"loss": 1.0}, 0.0, 100)
STARTED = TrainingMarker(False, 0.0, 50)
FINISHED = TrainingMarker(True, 0.0, 100)
OLD_FINISHED = TrainingMarker(True, 0.0, 99)

EVALUATED = Situation(newest=CHECKPOINT, result=RESULT)


@pytest.mark.parametrize(
    ("situation", "move"),
    [
        (Situation(), Move.WAIT),
        (Situation(newest=CHECKPOINT), Move.EVALUATE),
        (EVALUATED, Move.WAIT),
        (Situation(newest=CHECKPOINT, is_settling=True), Move.WAIT),
        (Situation(newest=CHECKPOINT, is_settling=True, marker=FINISHED), Move.WAIT),
        (Situation(newest=CHECKPOINT, is_stopped=True), Move.END),
        # Training has reported something.
        (Situation(marker=STARTED), Move.WAIT),
        (Situation(marker=FINISHED), Move.END),
        (Situation(newest=CHECKPOINT, marker=FINISHED), Move.EVALUATE),
        (dataclasses.replace(EVALUATED, marker=STARTED), Move.WAIT),
        (dataclasses.replace(EVALUATED, marker=FINISHED), Move.END),
        # A later training wrote the checkpoint.
        (dataclasses.replace(EVALUATED, marker=OLD_FINISHED), Move.WAIT),
        # A marker found at the start counts after the grace period.
        (dataclasses.replace(EVALUATED, marker=FINISHED, marker_at_start=FINISHED, is_in_grace_period=True), Move.WAIT),
        (dataclasses.replace(EVALUATED, marker=FINISHED, marker_at_start=FINISHED), Move.END),
        (dataclasses.replace(EVALUATED, marker=FINISHED, marker_at_start=STARTED, is_in_grace_period=True), Move.END),
        # `max_evaluations` is reached.
        (dataclasses.replace(EVALUATED, max_evaluations=4), Move.WAIT),
        (dataclasses.replace(EVALUATED, max_evaluations=3), Move.END),
        (dataclasses.replace(EVALUATED, max_evaluations=2), Move.END),
        (Situation(newest=CHECKPOINT, max_evaluations=2), Move.EVALUATE),
        (dataclasses.replace(EVALUATED, max_evaluations=3, is_in_grace_period=True), Move.END),
        (
            dataclasses.replace(EVALUATED, max_evaluations=3, evaluated_at_start=CHECKPOINT, is_in_grace_period=True),
            Move.WAIT,
        ),
        (dataclasses.replace(EVALUATED, max_evaluations=3, evaluated_at_start=CHECKPOINT), Move.END),
        # An unreadable checkpoint.
        (Situation(newest=CHECKPOINT, is_long_unreadable=True), Move.EVALUATE),
        (Situation(newest=CHECKPOINT, marker=FINISHED, is_long_unreadable=True), Move.FAIL),
        (Situation(newest=CHECKPOINT, marker=OLD_FINISHED, is_long_unreadable=True), Move.EVALUATE),
    ],
)
def test_the_next_move_follows_from_the_situation(situation: Situation, move: Move) -> None:
    assert next_move(situation) is move


def build_watch(directory: Path, advice_after: float = 0.0) -> CheckpointWatch:
    return CheckpointWatch(str(directory), max_evaluations=None, new_training_grace=0.0, advice_after=advice_after)


def test_a_weights_file_settles_once_it_stops_changing(tmp_path: Path) -> None:
    path = tmp_path / "a.weights.h5"
    path.write_text("x")
    watch = build_watch(tmp_path)
    assert watch.look().is_settling
    set_written(str(path), 10.0)
    assert watch.look().is_settling
    deadline, pause = time.monotonic() + DEADLINE, threading.Event()
    while watch.look().is_settling:
        assert time.monotonic() < deadline
        pause.wait(0.01)


def test_a_tensorflow_checkpoint_needs_no_settling(tmp_path: Path) -> None:
    (tmp_path / "a-1.index").write_text("x")
    assert not build_watch(tmp_path).look().is_settling


def test_a_known_result_does_not_belong_to_a_later_checkpoint_of_that_name(tmp_path: Path) -> None:
    path = tmp_path / "a-1.index"
    path.write_text("x")
    known = EvaluationResult("/elsewhere/a-1", 1, 10, {}, 0.0, path.stat().st_mtime_ns)
    append_result(tmp_path, known)
    watch = build_watch(tmp_path)
    assert watch.look().result == known
    assert watch.look().evaluated_at_start == watch.look().newest
    set_written(str(path), 10.0)
    assert watch.look().result is None


def test_patience_runs_out_only_for_the_unreadable_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a-1.index").write_text("x")
    watch = build_watch(tmp_path)
    damaged = watch.look().newest
    assert watch.add_unreadable(damaged)
    assert not watch.add_unreadable(damaged)
    assert watch.look().is_long_unreadable
    (tmp_path / "a-2.index").write_text("x")
    set_written(str(tmp_path / "a-2.index"), 10.0)
    assert not watch.look().is_long_unreadable


@pytest.mark.parametrize(
    ("situation", "said"),
    [
        (Situation(), ["a first checkpoint in '/runs'", "31 s", "both processes see the same one"]),
        (Situation(newest=CHECKPOINT), ["until the checkpoint '/runs/ckpt-3' can be read", "incomplete"]),
        (Situation(newest=CHECKPOINT, result=RESULT), ["newer than '/runs/ckpt-3'", "mark_training_finished"]),
        (
            Situation(newest=CHECKPOINT, result=RESULT, marker=TrainingMarker(True, 0.0, 99)),
            ["newer than '/runs/ckpt-3'", "a later training seems to run"],
        ),
    ],
)
def test_advice_says_what_is_awaited_and_what_to_check(situation: Situation, said: list[str]) -> None:
    text = advice(situation, "/runs", 31.2)
    assert all(part in text for part in said), text


def test_a_wait_is_logged_once_and_advice_follows_after_its_time(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "coordinator")
    patient, impatient = build_watch(tmp_path, 1000.0), build_watch(tmp_path, 1e-9)
    for _ in range(3):
        patient.report_wait(Situation())
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    patient.add_result(CHECKPOINT, RESULT)
    patient.report_wait(Situation())
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.INFO]
    caplog.clear()
    impatient.report_wait(Situation())
    impatient.report_wait(Situation())
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]
