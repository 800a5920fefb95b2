"""Tests of when the evaluator ends and when it waits."""

import logging
import threading
from pathlib import Path

import pytest

from coordinator.evaluation import (
    mark_training_finished,
    mark_training_started,
    results,
)
from coordinator.evaluation.status_files import MARKER_FILE
from tests.evaluation.tiny_training import (
    DEADLINE,
    Background,
    Logged,
    TinyTraining,
    build_evaluator,
    set_written,
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


# row 197
def test_it_ends_after_max_evaluations_even_if_checkpoints_were_skipped(tmp_path: Path) -> None:
    training = TinyTraining(tmp_path)
    for step in (1, 2, 3):
        training.save(step)
    evaluated = build_evaluator(tmp_path, max_evaluations=2).start(DEADLINE)
    assert [result.number for result in evaluated] == [3]


def test_a_restarted_evaluator_does_not_repeat_evaluations(tmp_path: Path) -> None:
    training = TinyTraining(tmp_path)
    training.save(1)
    mark_training_finished(tmp_path)
    assert len(build_evaluator(tmp_path).start(DEADLINE)) == 1
    assert build_evaluator(tmp_path).start(DEADLINE) == []
    training.save(2)
    mark_training_finished(tmp_path)
    assert [result.step for result in build_evaluator(tmp_path).start(DEADLINE)] == [2]
    assert [result.step for result in results(tmp_path)] == [1, 2]


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


def test_a_checkpoint_of_a_training_without_marker_invalidates_an_old_marker(tmp_path: Path) -> None:
    mark_training_finished(tmp_path)
    set_written(str(tmp_path / MARKER_FILE), -600.0)
    training, evaluated = TinyTraining(tmp_path), threading.Event()
    training.save(1)
    evaluator = build_evaluator(tmp_path, on_evaluation=lambda _: evaluated.set())
    running = Background(lambda: evaluator.start(DEADLINE))
    assert evaluated.wait(DEADLINE)
    evaluated.clear()
    training.save(2)
    assert evaluated.wait(DEADLINE)
    mark_training_finished(tmp_path)
    assert [result.step for result in running.result()] == [1, 2]


def test_an_old_marker_ends_the_evaluator_after_the_grace_period(tmp_path: Path) -> None:
    mark_training_finished(tmp_path)
    assert build_evaluator(tmp_path, new_training_grace=0.2).start(DEADLINE) == []


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
    evaluator = build_evaluator(tmp_path, stop=stop, poll_interval=DEADLINE)
    with Logged("waiting for a first checkpoint") as log:
        running = Background(lambda: evaluator.start(10 * DEADLINE))
        log.wait_seen()
    (stop.set if by_event else evaluator.stop)()
    assert running.result(DEADLINE / 2) == []


def test_a_timeout_error_says_what_was_awaited(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=f"waiting for a first checkpoint in .*{tmp_path.name}"):
        build_evaluator(tmp_path).start(timeout=0.05)
