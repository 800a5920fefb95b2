import dataclasses
import os
from pathlib import Path

import pytest

from coordinator.evaluation import EvaluationResult
from coordinator.evaluation.checkpoint_watch import (
    SETTLING_TIME,
    CheckpointFile,
    CheckpointWatch,
    Move,
    Situation,
    newest_checkpoint,
    next_move,
)
from coordinator.evaluation.status_files import TrainingMarker
from tests.virtual_clock import VirtualClock

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
        # `max_evaluations` is reached.
        (dataclasses.replace(EVALUATED, max_evaluations=4), Move.WAIT),
        (dataclasses.replace(EVALUATED, max_evaluations=3), Move.END),
        (Situation(newest=CHECKPOINT, max_evaluations=2), Move.EVALUATE),
        (
            dataclasses.replace(EVALUATED, max_evaluations=3, evaluated_at_start=CHECKPOINT, is_in_grace_period=True),
            Move.WAIT,
        ),
        # An unreadable checkpoint.
        (Situation(newest=CHECKPOINT, is_long_unreadable=True), Move.EVALUATE),
        (Situation(newest=CHECKPOINT, marker=FINISHED, is_long_unreadable=True), Move.FAIL),
        (Situation(newest=CHECKPOINT, marker=OLD_FINISHED, is_long_unreadable=True), Move.EVALUATE),
    ],
)
def test_the_next_move_follows_from_the_situation(situation: Situation, move: Move) -> None:
    assert next_move(situation) is move


def test_a_weights_file_settles_once_it_stops_changing(tmp_path: Path, clock: VirtualClock) -> None:
    path = tmp_path / "a.weights.h5"
    path.write_text("x")
    watch = CheckpointWatch(str(tmp_path), max_evaluations=1, new_training_grace=5.0, advice_after=5.0, clock=clock)
    assert watch.look().is_settling
    clock.advance(SETTLING_TIME)
    os.utime(path, (10, 10))
    assert watch.look().is_settling
    clock.advance(SETTLING_TIME)
    assert not watch.look().is_settling


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("ckpt-12", 12),
        ("ckpt-12.weights.h5", 12),
        ("weights.03.weights.h5", 3),
        ("model.weights.h5", None),
        ("ckpt-05-0.25.weights.h5", None),
        ("model2.weights.h5", None),
    ],
)
def test_the_number_is_at_the_end_of_the_name(name: str, number: int | None) -> None:
    assert CheckpointFile(f"/runs-9/{name}", 0).number == number


def test_a_copy_has_every_file_and_outlives_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    for name, text in {"a-1.index": "i", "a-1.data-00000-of-00002": "0", "a-1.data-00001-of-00002": "1"}.items():
        (tmp_path / name).write_text(text)
    checkpoint = CheckpointFile.of_file(str(tmp_path / "a-1.index"))
    assert checkpoint.copy_to(str(tmp_path / "to" / "best-1")) == str(tmp_path / "to" / "best-1")
    for file in checkpoint.files():
        Path(file).unlink()
    copies = {path.name: path.read_text() for path in (tmp_path / "to").iterdir()}
    assert copies == {"best-1.index": "i", "best-1.data-00000-of-00002": "0", "best-1.data-00001-of-00002": "1"}


def test_a_checkpoint_replaced_since_it_was_found_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a-1.index"
    path.write_text("x")
    checkpoint = CheckpointFile.of_file(str(path))
    checkpoint.require_unchanged()
    os.utime(path, ns=(0, checkpoint.written_ns + 1))
    with pytest.raises(OSError, match="was replaced"):
        checkpoint.require_unchanged()
    path.unlink()
    checkpoint.require_unchanged()  # what was read before the deletion is complete


def found(name: str, written_ns: int) -> CheckpointFile:
    return CheckpointFile(f"/d/{name}", written_ns)


@pytest.mark.parametrize(
    ("checkpoints", "latest", "listed", "newest"),
    [
        ([], None, [], None),
        ([found("a-1", 5), found("a-2", 6)], None, [], "a-2"),
        ([found("a-9", 5), found("a-10", 5)], None, [], "a-10"),
        # A copied directory: only the state file has the order.
        ([found("a-9", 7), found("a-10", 6)], "a-10", ["a-9", "a-10"], "a-10"),
        # Written, but not yet listed.
        ([found("a-1", 5), found("a-2", 6)], "a-1", ["a-1"], "a-2"),
        ([found("a-1", 5), found("b.weights.h5", 6)], "a-1", ["a-1"], "b.weights.h5"),
        # Not listed, because an earlier training wrote it.
        ([found("old-7", 3), found("a-1", 5)], "a-1", ["a-1"], "a-1"),
        # The latest was deleted.
        ([found("a-1", 5)], "a-2", ["a-1", "a-2"], "a-1"),
    ],
)
def test_the_newest_is_the_latest_listed_or_a_later_unlisted_one(
    checkpoints: list[CheckpointFile], latest: str | None, listed: list[str], newest: str | None
) -> None:
    checkpoint = newest_checkpoint(checkpoints, latest, listed)
    assert (checkpoint.name if checkpoint else None) == newest
