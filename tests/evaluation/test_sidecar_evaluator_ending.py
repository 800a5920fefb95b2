"""When the evaluator ends, and when it waits."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator import SidecarEvaluator
from coordinator.evaluation import (
    mark_training_finished,
    mark_training_started,
    results,
)
from coordinator.evaluation.training_marker import MARKER_FILE
from tests.evaluation.tiny_training import (
    DEADLINE,
    Background,
    Logged,
    TinyTraining,
    made_evaluator,
    set_written,
)


def test_it_follows_training_until_training_says_that_it_has_finished(tmp_path: Path) -> None:
    training, directory = TinyTraining(tmp_path / "made" / "later"), tmp_path / "made" / "later"
    evaluated = threading.Event()
    evaluator = made_evaluator(directory, on_evaluation=lambda _: evaluated.set())
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
def test_it_ends_after_a_checkpoint_of_that_number_even_if_it_skipped_some(tmp_path: Path) -> None:
    training = TinyTraining(tmp_path)
    for step in (1, 2, 3):
        training.save(step)
    made = made_evaluator(tmp_path, max_evaluations=2).start(DEADLINE)
    assert [result.number for result in made] == [3]


def test_a_restarted_evaluator_does_not_repeat_what_is_done(tmp_path: Path) -> None:
    training = TinyTraining(tmp_path)
    training.save(1)
    mark_training_finished(tmp_path)
    assert len(made_evaluator(tmp_path).start(DEADLINE)) == 1
    assert made_evaluator(tmp_path).start(DEADLINE) == []
    training.save(2)
    mark_training_finished(tmp_path)
    assert [result.step for result in made_evaluator(tmp_path).start(DEADLINE)] == [2]
    assert [result.step for result in results(tmp_path)] == [1, 2]


def test_an_old_marker_does_not_end_the_evaluation_of_a_training_that_begins_after_the_evaluator(
    tmp_path: Path,
) -> None:
    TinyTraining(tmp_path).save(1)
    mark_training_finished(tmp_path)
    evaluated = threading.Event()
    evaluator = made_evaluator(tmp_path, new_training_grace=DEADLINE, on_evaluation=lambda _: evaluated.set())
    running = Background(lambda: evaluator.start(DEADLINE))
    assert evaluated.wait(DEADLINE)
    mark_training_started(tmp_path)
    evaluated.clear()
    TinyTraining(tmp_path).save(2)
    assert evaluated.wait(DEADLINE)
    mark_training_finished(tmp_path)
    assert [result.step for result in running.result()] == [1, 2]


def test_an_old_marker_is_void_once_a_training_that_said_nothing_writes_a_checkpoint(tmp_path: Path) -> None:
    mark_training_finished(tmp_path)
    set_written(str(tmp_path / MARKER_FILE), -600.0)
    training, evaluated = TinyTraining(tmp_path), threading.Event()
    training.save(1)
    evaluator = made_evaluator(tmp_path, on_evaluation=lambda _: evaluated.set())
    running = Background(lambda: evaluator.start(DEADLINE))
    assert evaluated.wait(DEADLINE)
    evaluated.clear()
    training.save(2)
    assert evaluated.wait(DEADLINE)
    mark_training_finished(tmp_path)
    assert [result.step for result in running.result()] == [1, 2]


def test_a_marker_that_nothing_follows_is_believed_after_the_grace(tmp_path: Path) -> None:
    mark_training_finished(tmp_path)
    assert made_evaluator(tmp_path, new_training_grace=0.2).start(DEADLINE) == []


# row 194
def test_a_long_wait_for_a_first_checkpoint_gives_advice_and_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "nowhere"
    with Logged("Does training write its checkpoints to this directory") as log:
        evaluator = made_evaluator(directory, advice_after=0.1, max_evaluations=1)
        running = Background(lambda: evaluator.start(DEADLINE))
        log.wait_seen()
        TinyTraining(directory).save(1)
        assert len(running.result()) == 1
    assert str(directory) in log.messages[0]


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[tuple[SidecarEvaluator, threading.Event, Background]]:
    stop = threading.Event()
    evaluator = made_evaluator(tmp_path, stop=stop, poll_interval=DEADLINE)
    running = Background(lambda: evaluator.start(10 * DEADLINE))
    yield evaluator, stop, running
    stop.set()
    running.result()


def test_the_stop_event_ends_a_wait_at_once(waiting: tuple[SidecarEvaluator, threading.Event, Background]) -> None:
    _, stop, running = waiting
    stop.set()
    assert running.result(DEADLINE / 2) == []


def test_stop_ends_a_wait_at_once(waiting: tuple[SidecarEvaluator, threading.Event, Background]) -> None:
    evaluator, _, running = waiting
    evaluator.stop()
    assert running.result(DEADLINE / 2) == []


def test_a_timeout_says_what_was_awaited(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=f"waits for a first checkpoint in .*{tmp_path.name}"):
        made_evaluator(tmp_path).start(timeout=0.05)
