"""Each example runs by the command in its docstring, ends by itself, and does what its docstring says."""

import concurrent.futures
import contextlib
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from coordinator.evaluation import latest_result, results
from tests import ROOT
from tests.deadline import wait_until
from tests.program_runner import COORDINATOR, ProgramRunner

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "tutorial/training.ipynb"

# A line that TensorFlow's C++ code logs, or a line of gRPC's description of an error.
LOG_LINE = re.compile(
    r"^([IWE]\d{4} \d\d:|WARNING: All log messages|.*GRPC error information|.*grpc_status)", re.MULTILINE
)


def command_of(example: str) -> list[str]:
    """Returns the arguments of `coordinator` in the docstring of an example, without the example."""
    text = (EXAMPLES / example).read_text(encoding="utf-8")
    command = re.search(rf"^coordinator (run .*)examples/{example}(?: |$)", text, re.MULTILINE)
    assert command is not None, f"{example} does not say how it is started."
    return command[1].split()


def run(run_program: ProgramRunner, example: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs an example by the command in its docstring."""
    return run_program(COORDINATOR, *command_of(example), EXAMPLES / example, *arguments, timeout=360)


def running(path: Path, *arguments: str) -> Iterator[psutil.Process]:
    """Yields the processes that run a program with these arguments."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[1:] == [str(path), *arguments]:
                yield process


def number_in(printed: str, pattern: str) -> float:
    """Returns the last number that a program printed after a text."""
    found = re.findall(rf"{pattern} ([\d.]+)", printed)
    assert found, printed
    return float(found[-1])


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
        [launcher] = {program.parent() for program in running(EXAMPLES / "digits/train.py", *arguments)}
        [worker] = [process for process in launcher.children(recursive=True) if process.name() == "worker-1"]
        worker.kill()
        ended = command.result()

    assert not LOG_LINE.search(ended.stdout + ended.stderr)
    lost = [line for line in ended.stderr.splitlines() if "/job:worker/replica:0/task:1 was lost" in line]
    assert len(lost) == 1
    assert ended.stderr.count("/job:worker/task:1 ended unexpectedly, by SIGKILL") == 1
    assert "1200/1200" in ended.stderr, "the progress bar"
    accuracy = number_in(ended.stdout, r"\[evaluator\] final held-out accuracy")
    assert accuracy >= 0.95
    evaluated = latest_result(directory)
    assert 1200 <= evaluated.step < 1300, "functions that were lost with the worker may have run twice"
    assert round(evaluated.metrics["accuracy"], 4) == accuracy
    assert [result.step for result in results(directory)] == sorted({result.step for result in results(directory)})
    assert list(directory.glob(f"ckpt-{evaluated.step}.index"))
    assert list((directory / "summaries").rglob("events.out.tfevents.*"))


@pytest.mark.long
def test_the_program_with_flags_gets_them_and_logs_in_the_format_of_absl(run_program: ProgramRunner) -> None:
    ended = run(run_program, "flags/train.py", "--steps=99", "--learning_rate=0.3")
    [line] = re.findall(r"^.*99 steps, last loss.*$", ended.stderr, re.MULTILINE)
    assert re.match(r"I\d{4} [\d:.]+ \d+ train.py:\d+\] ", line)
    assert number_in(ended.stdout, "slope") == pytest.approx(2.0, abs=0.1)


@pytest.mark.release
def test_fit_learns_the_digits_also_by_a_rule_and_under_another_strategy(
    run_program: ProgramRunner, tmp_path: Path
) -> None:
    arguments = ["--directory", tmp_path / "digits"]
    rule = ["--rule", "StaleSynchronous", "--rule-option", "get_model_frequency=4", "--rule-option", "max_lead=8"]
    printed = [run(run_program, "keras_fit/train.py", *arguments, *each).stdout for each in ([], rule)]
    assert (tmp_path / "digits" / "best.keras").exists()
    assert list((tmp_path / "digits" / "validation").glob("events.out.tfevents.*"))
    source = (EXAMPLES / "keras_fit/train.py").read_text(encoding="utf-8")
    printed.append(run_program(source, *arguments, "--strategy", "mirrored", timeout=360).stdout)
    assert all(number_in(each, "held-out accuracy") > 0.95 for each in printed)


@pytest.mark.release
# row 189: wide and deep
def test_the_models_and_loops_of_the_other_examples_learn(run_program: ProgramRunner, tmp_path: Path) -> None:
    for name in ("join_every_epoch", "fully_asynchronous"):
        printed = run(run_program, f"loops/{name}.py").stdout
        [weights] = re.findall(r"^weights (.*)$", printed, re.MULTILINE)
        assert [float(weight) for weight in weights.split()] == pytest.approx([2.0, -3.0, 0.5, 1.0], abs=0.1)
    printed = run(run_program, "recommender/train.py", "--directory", tmp_path).stdout
    assert 0.6 < number_in(printed, r"step \d{4}: held-out AUC") < number_in(printed, "AUC of the truth") < 0.95
    assert number_in(run(run_program, "wide_and_deep/train.py").stdout, "held-out accuracy") > 0.93
    printed = run(run_program, "keras_loop/train.py").stdout
    assert "400 updates of 400 steps" in printed
    assert number_in(printed, "held-out accuracy") > 0.95


@pytest.mark.release
def test_a_model_sees_each_example_once_while_servers_are_killed(run_program: ProgramRunner, tmp_path: Path) -> None:
    path = str(EXAMPLES / "exactly_once/train.py")
    program = f"import runpy, sys; sys.argv[0] = {path!r}; runpy.run_path({path!r}, run_name='__main__')"
    printed = run_program(program, "--seed", 3, "--directory", tmp_path / "saved", timeout=800).stdout
    assert "examples never seen: 0, seen again: 0" in printed, printed
    assert int(re.search(r"^(\d+) faults: ", printed, re.MULTILINE)[1]) > 0


@pytest.mark.long
def test_a_killed_program_continues_from_its_latest_checkpoint_and_finishes(
    run_program: ProgramRunner, tmp_path: Path
) -> None:
    directory, arguments = tmp_path / "checkpoints", ("--directory", str(tmp_path / "checkpoints"))
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        command = threads.submit(run, run_program, "restart/train.py", *arguments)
        wait_until(lambda: command.done() or (directory / "checkpoint").exists(), 240.0)
        for client in running(EXAMPLES / "restart/train.py", *arguments):
            client.send_signal(signal.SIGKILL)
        ended = command.result()

    begun = [int(step) for step in re.findall(r"^process \d+ begins at step (\d+)$", ended.stdout, re.MULTILINE)]
    assert len(begun) == 2, ended.stdout
    assert begun[0] == 0 < begun[1] < 1200
    assert begun[1] % 60 == 0
    assert number_in(ended.stdout, "1200 steps, accuracy") >= 0.95
    assert "the chief was ended by SIGKILL: starting it again, restart 1 of 3." in ended.stderr


@pytest.mark.release
def test_update_rules_and_an_own_one_learn_the_digits_and_print_statistics(
    run_program: ProgramRunner, tmp_path: Path
) -> None:
    # Outside of the checkout.
    program = shutil.copy(EXAMPLES / "own_rule/train.py", tmp_path / "program.py")
    printed = [run_program(COORDINATOR, *command_of("own_rule/train.py"), program, timeout=360).stdout]
    for rule in ("asynchronous", "model-average"):
        folder = tmp_path / rule
        printed.append(run(run_program, "update_rules/train.py", "--rule", rule, "--directory", folder).stdout)
        assert list(folder.rglob("events.out.tfevents.*"))
    for each in printed:
        assert number_in(each, "held-out accuracy") >= 0.8
        assert re.search(r"^[1-9]\d* updates, 0 of \d+ gradients rejected, staleness mean ", each, re.MULTILINE), each


# Executes the notebook whose path is its argument. Presses Interrupt when the cell that may raise waits in join.
EXECUTE = """
import asyncio, sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
client = NotebookClient(notebook, kernel_name="python3", timeout=300)
interrupts = []

def observe(message, cell, index, observed=client.process_message):
    if "raises-exception" in cell.metadata.get("tags", ()) and message["header"]["msg_type"] == "stream":
        if "join waits" in message["content"]["text"]:
            interrupts.append(asyncio.ensure_future(client.km.interrupt_kernel()))
    return observed(message, cell, index)

client.process_message = observe
client.execute()
outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
errors = {name: output.ename for name, shown in outputs.items() for output in shown if output.output_type == "error"}
assert errors == {"interrupted": "KeyboardInterrupt"}, errors
assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")

def text(name):
    return "".join(output.text for output in outputs[name] if output.output_type == "stream")

before, after = [line for line in text("cancel").splitlines() if " waiting, " in line]
assert not before.startswith("0 waiting"), before
assert after.startswith("0 waiting, 0 running, "), after
assert "the loss was" in text("more") and "the weights are 2.00 -3.00 0.50 1.00" in text("evaluation")
"""


@pytest.mark.release
def test_the_notebook_runs_with_an_interrupted_cell(run_program: ProgramRunner) -> None:
    run_program(EXECUTE, NOTEBOOK, timeout=480)


def test_examples_are_whole_programs_under_100_lines_and_have_a_test() -> None:
    tested = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    for path in EXAMPLES.rglob("*.py"):
        name = str(path.relative_to(EXAMPLES))
        assert len(path.read_text(encoding="utf-8").splitlines()) < 100, path
        assert name in tested or (path.parent.name == "loops" and path.stem in tested), path
        if name not in ("data_service/serve.py", "exactly_once/train.py"):
            assert name == "data_service/train.py" or command_of(name)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")]
