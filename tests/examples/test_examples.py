"""Each example runs by the command in its docstring, ends by itself, and does what its docstring says."""

import concurrent.futures
import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from coordinator.evaluation import latest_result, results
from tests import ROOT
from tests.deadline import wait_until
from tests.program_runner import COORDINATOR, ProgramRunner

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


# A line that TensorFlow's C++ code logs, or a line of gRPC's description of an error.
LOG_LINE = re.compile(
    r"^([IWE]\d{4} \d\d:|WARNING: All log messages|.*GRPC error information|.*grpc_status)", re.MULTILINE
)


def printed_by(run_program: ProgramRunner, example: str, *arguments: str) -> str:
    """Runs an example by the command in its docstring; returns what it printed."""
    return run(run_program, example, *arguments).stdout


def run(run_program: ProgramRunner, example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = ROOT / "examples" / example.partition(" ")[0]
    command = re.search(rf"^coordinator (run .*)examples/{example}$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert command is not None, f"{path} does not say how it is started."
    return run_program(COORDINATOR, *command[1].split(), path, *arguments, timeout=360)


def programs(path: Path, *arguments: str) -> Iterator[psutil.Process]:
    """Yields the processes that run a program with these arguments."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[1:] == [str(path), *arguments]:
                yield process


@pytest.mark.long
def test_the_digits_are_learned_with_a_sidecar_although_a_worker_dies(
    run_program: ProgramRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    directory = tmp_path / "digits"
    arguments = ("--directory", str(directory))
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        command = threads.submit(run, run_program, "digits/train.py", *arguments)
        wait_until(lambda: command.done() or (directory / "checkpoint").exists(), 120.0)
        [launcher] = {program.parent() for program in programs(ROOT / "examples/digits/train.py", *arguments)}
        [worker] = [process for process in launcher.children(recursive=True) if process.name() == "worker-1"]
        worker.kill()
        ended = command.result()
    printed = ended.stdout

    assert not LOG_LINE.search(ended.stdout + ended.stderr)
    lost = [line for line in ended.stderr.splitlines() if "/job:worker/replica:0/task:1 was lost" in line]
    assert len(lost) == 1
    assert ended.stderr.count("/job:worker/task:1 ended unexpectedly, by SIGKILL") == 1
    assert "1200/1200" in ended.stderr, "the progress bar"
    final = re.search(r"^\[evaluator\] final held-out accuracy (\S+)$", printed, re.MULTILINE)
    assert final is not None, printed
    assert float(final[1]) >= 0.95
    evaluated = latest_result(directory)
    assert evaluated is not None
    assert 1200 <= evaluated.step < 1300, "functions that were lost with the worker may have run twice"
    assert round(evaluated.metrics["accuracy"], 4) == float(final[1])
    assert [result.step for result in results(directory)] == sorted({result.step for result in results(directory)})
    assert list(directory.glob(f"ckpt-{evaluated.step}.index"))
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


@pytest.mark.long
def test_a_recommender_whose_table_grows_comes_near_the_truth(run_program: ProgramRunner, tmp_path: Path) -> None:
    printed = printed_by(run_program, "recommender/train.py", "--directory", str(tmp_path))
    truth = re.search(r"^\[evaluator\] AUC of the truth (0\.\d+)$", printed, re.MULTILINE)
    evaluated = re.findall(r"^\[evaluator\] step (\d+): held-out AUC (0\.\d+)$", printed, re.MULTILINE)
    assert truth is not None, printed
    step, auc = evaluated[-1]
    assert int(step) >= 2400
    assert 0.6 < float(auc) < float(truth[1]) < 0.95


@pytest.mark.long
def test_the_program_with_flags_gets_them_and_logs_in_the_format_of_absl(run_program: ProgramRunner) -> None:
    ended = run(run_program, "flags/train.py --steps=200 --learning_rate=0.2", "--steps=99")
    [line] = re.findall(r"^.*99 steps, last loss.*$", ended.stderr, re.MULTILINE)
    assert re.match(r"I\d{4} [\d:.]+ \d+ train.py:\d+\] ", line)
    assert re.search(r"^slope (1\.9|2\.0)\d, intercept -(0\.9|1\.0)\d$", ended.stdout, re.MULTILINE), ended.stdout


def weights_in(printed: str) -> list[float]:
    """Returns the weights that a loop printed at its end."""
    found = re.search(r"^weights (.*)$", printed, re.MULTILINE)
    assert found is not None, printed
    return [float(weight) for weight in found[1].split()]


def test_every_example_is_a_whole_program_under_100_lines_and_has_a_test() -> None:
    tested = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    for path in (ROOT / "examples").rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 100, path
        assert str(path.relative_to(ROOT / "examples")) in tested, path
