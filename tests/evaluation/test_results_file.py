from pathlib import Path

import pytest

from coordinator.errors import EvaluationError
from coordinator.evaluation import EvaluationResult, latest_result, results
from coordinator.evaluation.results_file import RESULTS_FILE, ResultsFile


def made_result(number: int) -> EvaluationResult:
    return EvaluationResult(f"/there/ckpt-{number}", number, number * 10, {"loss": 0.5}, 1.25, 7)


def test_what_is_appended_is_read_in_order(tmp_path: Path) -> None:
    written = [made_result(number) for number in (1, 2, 3)]
    for result in written:
        ResultsFile(tmp_path).append(result)
    assert results(tmp_path) == written
    assert latest_result(tmp_path) == written[-1]


def test_a_directory_without_evaluations_or_not_there_has_no_results(tmp_path: Path) -> None:
    assert latest_result(tmp_path) is None
    assert latest_result(tmp_path / "absent") is None
    assert results(tmp_path / "absent") == []


@pytest.mark.parametrize("half", ['{"checkpoint": "/there/ck', made_result(2).to_json(), '{"half":\n'])
def test_a_half_written_last_line_is_ignored(tmp_path: Path, half: str) -> None:
    ResultsFile(tmp_path).append(made_result(1))
    with open(tmp_path / RESULTS_FILE, "a") as file:
        file.write(half)
    assert latest_result(tmp_path) == made_result(1)
    assert results(tmp_path) == [made_result(1)]


def test_a_half_written_line_is_repaired_by_the_next(tmp_path: Path) -> None:
    ResultsFile(tmp_path).append(made_result(1))
    with open(tmp_path / RESULTS_FILE, "a") as file:
        file.write('{"checkpoint": "/there/ck')
    ResultsFile(tmp_path).append(made_result(2))
    assert results(tmp_path) == [made_result(1), made_result(2)]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / RESULTS_FILE).write_text(f"{made_result(1).to_json()}\nbroken\n{made_result(2).to_json()}\n")
    with pytest.raises(EvaluationError, match=r"Line 2 of .*broken"):
        results(tmp_path)
    assert latest_result(tmp_path) == made_result(2)


def test_a_line_with_fields_of_a_later_version_is_read(tmp_path: Path) -> None:
    line = made_result(1).to_json().replace("{", '{"mood": "good", ', 1)
    (tmp_path / RESULTS_FILE).write_text(line + "\n")
    assert latest_result(tmp_path) == made_result(1)


def test_a_metric_that_is_not_a_number_survives(tmp_path: Path) -> None:
    ResultsFile(tmp_path).append(EvaluationResult("a-1", 1, 1, {"loss": float("nan")}, 0.0))
    result = latest_result(tmp_path)
    assert result is not None
    assert result.metrics["loss"] != result.metrics["loss"]
