"""What an evaluator does, for every kind of thing that it may see. No files, no time."""

import dataclasses

import pytest

from coordinator.evaluation.checkpoint_file import CheckpointFile
from coordinator.evaluation.evaluation_result import EvaluationResult
from coordinator.evaluation.next_move import Move, Situation, next_move
from coordinator.evaluation.training_marker import TrainingMarker

CHECKPOINT = CheckpointFile("/d/ckpt-3", 100)
RESULT = EvaluationResult("/d/ckpt-3", 3, 30, {"loss": 1.0}, 0.0, 100)
STARTED = TrainingMarker(False, 0.0, 50)
FINISHED = TrainingMarker(True, 0.0, 100)
OLD_FINISHED = TrainingMarker(True, 0.0, 99)

DONE = Situation(newest=CHECKPOINT, result=RESULT)


@pytest.mark.parametrize(
    ("situation", "move"),
    [
        (Situation(), Move.WAIT),
        (Situation(newest=CHECKPOINT), Move.EVALUATE),
        (DONE, Move.WAIT),
        (Situation(newest=CHECKPOINT, is_settling=True), Move.WAIT),
        (Situation(newest=CHECKPOINT, is_settling=True, marker=FINISHED), Move.WAIT),
        (Situation(newest=CHECKPOINT, is_stopped=True), Move.END),
        # Training says something.
        (Situation(marker=STARTED), Move.WAIT),
        (Situation(marker=FINISHED), Move.END),
        (Situation(newest=CHECKPOINT, marker=FINISHED), Move.EVALUATE),
        (dataclasses.replace(DONE, marker=STARTED), Move.WAIT),
        (dataclasses.replace(DONE, marker=FINISHED), Move.END),
        # A later training has written here.
        (dataclasses.replace(DONE, marker=OLD_FINISHED), Move.WAIT),
        # The marker was there at the start: first doubted, then believed.
        (dataclasses.replace(DONE, marker=FINISHED, marker_at_start=FINISHED, is_start_doubted=True), Move.WAIT),
        (dataclasses.replace(DONE, marker=FINISHED, marker_at_start=FINISHED), Move.END),
        (dataclasses.replace(DONE, marker=FINISHED, marker_at_start=STARTED, is_start_doubted=True), Move.END),
        # The number of evaluations.
        (dataclasses.replace(DONE, max_evaluations=4), Move.WAIT),
        (dataclasses.replace(DONE, max_evaluations=3), Move.END),
        (dataclasses.replace(DONE, max_evaluations=2), Move.END),
        (Situation(newest=CHECKPOINT, max_evaluations=2), Move.EVALUATE),
        (dataclasses.replace(DONE, max_evaluations=3, is_start_doubted=True), Move.END),
        (dataclasses.replace(DONE, max_evaluations=3, newest_at_start=CHECKPOINT, is_start_doubted=True), Move.WAIT),
        (dataclasses.replace(DONE, max_evaluations=3, newest_at_start=CHECKPOINT), Move.END),
        # A checkpoint that cannot be read.
        (Situation(newest=CHECKPOINT, is_out_of_patience=True), Move.EVALUATE),
        (Situation(newest=CHECKPOINT, marker=FINISHED, is_out_of_patience=True), Move.GIVE_UP),
        (Situation(newest=CHECKPOINT, marker=OLD_FINISHED, is_out_of_patience=True), Move.EVALUATE),
    ],
)
def test_the_next_move_follows_from_what_is_seen(situation: Situation, move: Move) -> None:
    assert next_move(situation) is move
