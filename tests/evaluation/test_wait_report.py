import logging

import pytest

from coordinator.evaluation.checkpoint_file import CheckpointFile
from coordinator.evaluation.evaluation_result import EvaluationResult
from coordinator.evaluation.next_move import Situation
from coordinator.evaluation.training_marker import TrainingMarker
from coordinator.evaluation.wait_report import WaitReport, advice

CHECKPOINT = CheckpointFile("/runs/ckpt-3", 100)
RESULT = EvaluationResult("/runs/ckpt-3", 3, 30, {}, 0.0, 100)


@pytest.mark.parametrize(
    ("situation", "said"),
    [
        (Situation(), ["a first checkpoint in '/runs'", "31 s", "both processes see the same one"]),
        (Situation(newest=CHECKPOINT), ["until the checkpoint '/runs/ckpt-3' can be read", "half written"]),
        (Situation(newest=CHECKPOINT, result=RESULT), ["newer than '/runs/ckpt-3'", "mark_training_finished"]),
        (
            Situation(newest=CHECKPOINT, result=RESULT, marker=TrainingMarker(True, 0.0, 99)),
            ["newer than '/runs/ckpt-3'", "a later training is taken to be under way"],
        ),
    ],
)
def test_advice_says_what_is_awaited_and_what_to_look_at(situation: Situation, said: list[str]) -> None:
    text = advice(situation, "/runs", 31.2)
    assert all(part in text for part in said), text


def test_a_wait_is_reported_once_and_advice_after_its_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "coordinator")
    patient, hasty = WaitReport("/runs", 1000.0), WaitReport("/runs", 1e-9)
    for _ in range(3):
        patient.note_wait(Situation())
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    patient.note_progress()
    patient.note_wait(Situation())
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.INFO]
    caplog.clear()
    hasty.note_wait(Situation())
    hasty.note_wait(Situation())
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]
