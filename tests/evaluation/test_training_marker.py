from pathlib import Path

import pytest

from coordinator.errors import EvaluationError
from coordinator.evaluation import mark_training_finished, mark_training_started
from coordinator.evaluation.training_marker import MARKER_FILE, read_marker


def test_training_that_said_nothing_has_no_marker(tmp_path: Path) -> None:
    assert read_marker(tmp_path) is None
    assert read_marker(tmp_path / "absent") is None


def test_the_last_word_counts_and_makes_the_directory(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "here"
    mark_training_started(directory)
    assert read_marker(directory).is_finished is False
    mark_training_finished(directory)
    assert read_marker(directory).is_finished is True
    mark_training_started(str(directory))
    assert read_marker(directory).is_finished is False
    assert [path.name for path in directory.iterdir()] == [MARKER_FILE]


def test_two_markers_are_told_apart(tmp_path: Path) -> None:
    mark_training_finished(tmp_path)
    first = read_marker(tmp_path)
    mark_training_finished(tmp_path)
    assert read_marker(tmp_path) != first


@pytest.mark.parametrize("text", ["", "finished", '{"state": "tired", "time": 1}', "[]"])
def test_another_text_in_the_file_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / MARKER_FILE).write_text(text)
    with pytest.raises(EvaluationError, match=MARKER_FILE):
        read_marker(tmp_path)
