import os
from pathlib import Path

import pytest
import tensorflow as tf

from coordinator.errors import EvaluationError
from coordinator.evaluation import (
    EvaluationResult,
    best_result,
    latest_result,
    mark_training_finished,
    mark_training_started,
    results,
)
from coordinator.evaluation.status_files import (
    BEST_FILE,
    MARKER_FILE,
    RESULTS_FILE,
    append_result,
    read_marker,
    replace_text,
)
from tests.program_runner import ProgramRunner


def build_result(number: int) -> EvaluationResult:
    return EvaluationResult(f"/there/ckpt-{number}", number, number * 10, {"loss": 0.5}, 1.25, 7)


def test_a_half_written_line_is_repaired_and_a_broken_one_is_an_error_that_names_it(tmp_path: Path) -> None:
    append_result(tmp_path, build_result(1))
    with open(tmp_path / RESULTS_FILE, "a") as file:
        file.write('{"checkpoint": "/there/ck')
    append_result(tmp_path, build_result(2))
    assert results(tmp_path) == [build_result(1), build_result(2)]
    (tmp_path / RESULTS_FILE).write_text(f"{build_result(1).to_json()}\nbroken\n{build_result(2).to_json()}\n")
    with pytest.raises(EvaluationError, match=r"Line 2 of .*broken"):
        results(tmp_path)
    assert latest_result(tmp_path) == build_result(2)


def test_files_of_a_directory_or_a_url_are_created_and_the_last_marker_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for directory in ("ram://status/run", f"file://localhost{tmp_path}/run", str(tmp_path / "new" / "directory")):
        assert (results(directory), latest_result(directory), best_result(directory)) == ([], None, None)
        assert read_marker(directory) is None
        mark_training_started(directory)
        assert not read_marker(directory).is_finished
        mark_training_finished(directory)
        assert read_marker(directory).is_finished
        written = [build_result(number) for number in (1, 2, 3)]
        for result in written:
            append_result(directory, result)
        assert (results(directory), latest_result(directory)) == (written, written[-1])
        replace_text(f"{directory}/{BEST_FILE}", written[1].to_json())
        assert best_result(directory) == written[1]
        assert sorted(tf.io.gfile.listdir(directory)) == [BEST_FILE, RESULTS_FILE, MARKER_FILE]
    assert sorted(os.listdir(tmp_path)) == ["new", "run"]
    with pytest.raises(ValueError, match="pathlib"):
        mark_training_finished(Path("gs://bucket/run"))


def test_an_unreadable_marker_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    for text in ("", '{"state": "tired", "time": 1}', "[]"):
        (tmp_path / MARKER_FILE).write_text(text)
        with pytest.raises(EvaluationError, match=MARKER_FILE):
            read_marker(tmp_path)


def test_reading_results_and_marking_training_load_no_tensorflow(run_program: ProgramRunner, tmp_path: Path) -> None:
    result = EvaluationResult("ckpt-1", 1, 10, {"loss": 0.5}, 0.0)
    append_result(tmp_path, result)
    program = """
        import sys
        from coordinator import evaluation
        evaluation.mark_training_started(sys.argv[1])
        evaluation.mark_training_finished(sys.argv[1])
        evaluation.best_result(sys.argv[1])
        assert len(evaluation.results(sys.argv[1])) == 1
        print(evaluation.latest_result(sys.argv[1]).step, {"tensorflow", "keras", "numpy"} & set(sys.modules))
    """
    assert run_program(program, str(tmp_path), fresh=True).stdout == "10 set()\n"
    assert latest_result(tmp_path) == result
