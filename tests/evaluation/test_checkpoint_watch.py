import threading
import time
from pathlib import Path

from coordinator.evaluation.checkpoint_watch import CheckpointWatch
from coordinator.evaluation.evaluation_result import EvaluationResult
from tests.evaluation.tiny_training import DEADLINE, set_written


def made_watch(directory: Path, known: list[EvaluationResult] | None = None, patience: float = 0.0) -> CheckpointWatch:
    return CheckpointWatch(directory, known or [], max_evaluations=None, new_training_grace=0.0, patience=patience)


def test_a_weights_file_settles_once_it_has_not_changed_for_a_while(tmp_path: Path) -> None:
    path = tmp_path / "a.weights.h5"
    path.write_text("x")
    watch = made_watch(tmp_path)
    assert watch.look().is_settling
    set_written(str(path), 10.0)
    assert watch.look().is_settling
    deadline, pause = time.monotonic() + DEADLINE, threading.Event()
    while watch.look().is_settling:
        assert time.monotonic() < deadline
        pause.wait(0.01)


def test_a_tensorflow_checkpoint_needs_no_settling(tmp_path: Path) -> None:
    (tmp_path / "a-1.index").write_text("x")
    assert not made_watch(tmp_path).look().is_settling


def test_a_known_result_belongs_to_its_checkpoint_and_not_to_a_later_one_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a-1.index"
    path.write_text("x")
    known = EvaluationResult("/elsewhere/a-1", 1, 10, {}, 0.0, path.stat().st_mtime_ns)
    watch = made_watch(tmp_path, [known])
    assert watch.look().result == known
    assert watch.look().newest_at_start == watch.look().newest
    set_written(str(path), 10.0)
    assert watch.look().result is None


def test_patience_runs_out_for_the_checkpoint_that_is_unreadable_only(tmp_path: Path) -> None:
    (tmp_path / "a-1.index").write_text("x")
    watch = made_watch(tmp_path)
    damaged = watch.look().newest
    assert watch.note_unreadable(damaged)
    assert not watch.note_unreadable(damaged)
    assert watch.look().is_out_of_patience
    (tmp_path / "a-2.index").write_text("x")
    set_written(str(tmp_path / "a-2.index"), 10.0)
    assert not watch.look().is_out_of_patience
