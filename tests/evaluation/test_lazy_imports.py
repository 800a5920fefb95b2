from pathlib import Path

import pytest

import coordinator.evaluation
from coordinator.evaluation import EvaluationResult, latest_result
from coordinator.evaluation.results_file import ResultsFile
from tests.program_runner import ProgramRunner


@pytest.mark.parametrize("name", coordinator.evaluation.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(coordinator.evaluation, name).__name__ == name
    assert name in dir(coordinator.evaluation)


def test_a_misspelt_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="latest_results"):
        _ = coordinator.evaluation.latest_results


def test_reading_results_and_marking_training_load_no_tensorflow(run_program: ProgramRunner, tmp_path: Path) -> None:
    result = EvaluationResult("ckpt-1", 1, 10, {"loss": 0.5}, 0.0)
    ResultsFile(tmp_path).append(result)
    program = """
        import sys
        from coordinator import evaluation
        evaluation.mark_training_started(sys.argv[1])
        evaluation.mark_training_finished(sys.argv[1])
        evaluation.best_result(sys.argv[1])
        assert len(evaluation.results(sys.argv[1])) == 1
        print(evaluation.latest_result(sys.argv[1]).step, {"tensorflow", "keras", "numpy"} & set(sys.modules))
    """
    assert run_program(program, str(tmp_path)).stdout == "10 set()\n"
    assert latest_result(tmp_path) == result
