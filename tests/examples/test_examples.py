"""Each example runs as its first lines say, ends by itself, and what it claims is so."""

import re
from pathlib import Path

import pytest

from coordinator.evaluation import latest_result, results
from tests.import_graph import ROOT
from tests.program_runner import COORDINATOR, ProgramRunner

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def printed_by(run_program: ProgramRunner, example: str, *arguments: str) -> str:
    """Runs an example by the command in its docstring; returns what it printed."""
    path = ROOT / "examples" / example
    command = re.search(rf"^coordinator (run .*)examples/{example}$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert command is not None, f"{path} does not say how it is started."
    return run_program(COORDINATOR, *command[1].split(), path, *arguments, timeout=360).stdout


def test_the_digits_are_learned_to_95_percent_while_a_sidecar_evaluates(
    run_program: ProgramRunner, tmp_path: Path
) -> None:
    directory = tmp_path / "digits"
    printed = printed_by(run_program, "digits/train.py", "--directory", str(directory))

    final = re.search(r"^\[evaluator\] final held-out accuracy (\S+)$", printed, re.MULTILINE)
    assert final is not None, printed
    assert float(final[1]) >= 0.95
    evaluated = latest_result(directory)
    assert evaluated is not None
    assert evaluated.step == 1200
    assert round(evaluated.metrics["accuracy"], 4) == float(final[1])
    assert [result.step for result in results(directory)] == sorted({result.step for result in results(directory)})
    assert list(directory.glob("ckpt-1200.index"))
    assert list((directory / "summaries").rglob("events.out.tfevents.*"))


@pytest.mark.long
def test_the_loop_that_joins_every_epoch_learns_the_weights(run_program: ProgramRunner) -> None:
    printed = printed_by(run_program, "loops/join_every_epoch.py")
    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss (\S+)$", printed, re.MULTILINE)]
    assert len(losses) == 5
    assert losses[-1] < 0.1 * losses[0]
    assert weights_in(printed) == pytest.approx([2.0, -3.0, 0.5, 1.0], abs=0.1)


@pytest.mark.long
def test_the_fully_asynchronous_loop_learns_the_weights(run_program: ProgramRunner) -> None:
    printed = printed_by(run_program, "loops/fully_asynchronous.py")
    assert re.search(r"^\d+ steps, loss \S+$", printed, re.MULTILINE)
    assert weights_in(printed) == pytest.approx([2.0, -3.0, 0.5, 1.0], abs=0.1)


def weights_in(printed: str) -> list[float]:
    """The weights that a loop printed at its end."""
    found = re.search(r"^weights (.*)$", printed, re.MULTILINE)
    assert found is not None, printed
    return [float(weight) for weight in found[1].split()]


def test_every_example_is_a_whole_program_of_at_most_100_lines_and_has_a_test() -> None:
    tested = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    for path in (ROOT / "examples").rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 100, path
        assert str(path.relative_to(ROOT / "examples")) in tested, path
