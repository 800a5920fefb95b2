"""Each benchmark's program runs on real servers in a small setting, prints its table and writes its figures."""

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contestants.contestant_process import ContestantProcess
from tests.program_runner import ProgramRunner

MAIN = "import sys; from benchmarks.{} import main; sys.exit(main(sys.argv[1:]))"
# The sides that cannot run every model of a benchmark, which their tables say.
MAY_FAIL = {"dense": {"peer", "bare"}, "recurrent": {"peer", "bare"}, "rounding": {"peer", "bare"}}


def sides_with_rounds(found: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Returns the rounds in figures, each with its side."""
    for side, each in found.items() if isinstance(found, dict) else ():
        if isinstance(each, dict) and set(each) >= {"figures", "error"}:
            yield side, each
        else:
            yield from sides_with_rounds(each)


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    "benchmark",
    [
        *("data", "dense", "devices", "dispatch", "embeddings", "latency", "pauses", "recommender", "recurrent"),
        *("rounding", "startup", pytest.param("event_cost", marks=pytest.mark.long)),
    ],
)
def test_every_side_of_a_benchmark_of_speed_runs(run_program: ProgramRunner, benchmark: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    program = run_program(MAIN.format(benchmark), "--quick", "--json", path, timeout=680, fresh=benchmark == "startup")
    figures = json.loads(path.read_text())
    assert set(figures["versions"]) == {"coordinator", "tensorflow", "keras", "grpcio"}
    rounds = [*sides_with_rounds(figures["found"])]
    assert rounds, program.stdout
    for side, each in rounds:
        assert each["figures"] or each["error"], (side, program.stdout)
        if not any(side.startswith(name) for name in MAY_FAIL.get(benchmark, ())):
            assert each["error"] is None, (side, each["error"])
            assert all(value >= 0 for values in each["figures"] for value in values.values()), side


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("benchmark", "arguments", "printed"),
    [
        ("evaluation", ["--repeats", 1, "--kills", 1, "--examples", 500], ": 1 exact"),
        ("memory", ["--quick"], r"ours, +client +\d+ +\d+"),
        ("recovery", ["--only", "worker-killed", "--repeats", 1], r"\d+\.\d\d s"),
        ("staleness", ["--only", "modulation", "--quick"], "The effect showed"),
        ("staleness", ["--only", "rules", "--quick"], r"bounded delay \d+ +\d"),
        ("staleness", ["--only", "idle", "--quick"], "The shape was"),
        pytest.param("scale_advice", ["--workers", 1, 2, "--seconds", 5], "more workers would", marks=pytest.mark.long),
        pytest.param("checkpoints", ["--quick"], r"background.* 8\n(.*\n)*manager.* 8", marks=pytest.mark.long),
        pytest.param("table_growth", ["--quick"], r"delta of it( +[\d.]+){5}", marks=pytest.mark.long),
        pytest.param("scale", ["--quick"], r"\n64 ", marks=pytest.mark.long),
    ],
)
def test_a_benchmark_prints_its_table(
    run_program: ProgramRunner, benchmark: str, arguments: list[object], printed: str
) -> None:
    shown = run_program(MAIN.format(benchmark), *arguments, timeout=680).stdout
    assert re.search(printed, shown), shown


@pytest.mark.parametrize(("benchmark", "arguments"), [("scale", ["--repeats", "0"]), ("recovery", ["--only", "flood"])])
def test_invalid_arguments_are_refused(
    benchmark: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"benchmarks.{benchmark}")
    with pytest.raises(SystemExit):
        module.main(arguments)
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.cluster
def test_a_contestant_that_does_not_answer_in_time_is_killed(tmp_path: Path) -> None:
    with (
        ContestantProcess("dispatch", "single", {}, tmp_path / "log", patience=0.01) as process,
        pytest.raises(RuntimeError, match="hangs"),
    ):
        process.wait_connected()
