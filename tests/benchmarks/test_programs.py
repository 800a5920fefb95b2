"""Each benchmark's program runs on real servers in a small setting, and prints its table or writes its figures."""

import faulthandler
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
        *("rounding", "startup", "event_cost"),
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
        ("scale_advice", ["--workers", 1, 2, "--seconds", 5], "more workers would"),
        ("checkpoints", ["--quick"], r"background.* 8\n(.*\n)*manager.* 8"),
        ("table_growth", ["--quick"], r"delta of it( +[\d.]+){5}"),
        ("scale", ["--quick"], r"\n64 "),
    ],
)
def test_a_benchmark_prints_its_table(
    run_program: ProgramRunner, benchmark: str, arguments: list[object], printed: str
) -> None:
    shown = run_program(MAIN.format(benchmark), *arguments, timeout=680).stdout
    assert re.search(printed, shown), shown


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(600)
def test_a_soak_test_loses_nothing_and_unaffected_workers_continue(run_program: ProgramRunner) -> None:
    program = run_program(MAIN.format("chaos"), "--minutes", 2, "--seed", 5, "--json", timeout=560)
    found = json.loads(program.stdout.splitlines()[-1])
    assert found["holds"], found
    assert sum(found["faults"].values()) >= 5, found
    assert found["scheduled"] == found["finished"] > 100, found


@pytest.mark.cluster
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--runs", 1, "--seed", 2, "--seconds", 5], marks=pytest.mark.long),
        pytest.param(["--minutes", 10, "--seconds", 60], marks=pytest.mark.release),
    ],
)
@pytest.mark.timeout(2400)
def test_no_example_is_left_out_or_repeated_whatever_dies(run_program: ProgramRunner, arguments: list[object]) -> None:
    # The limit for all tests (`faulthandler_timeout`) is too short for ten minutes and what the last run takes.
    faulthandler.dump_traceback_later(2350, exit=True, file=sys.__stderr__)
    printed = run_program(MAIN.format("exactly_once"), *arguments, timeout=2300).stdout
    found = json.loads(printed.splitlines()[-1])
    assert found["hold"] == found["runs"] > 0, printed
    assert sum(found["faults"].values()) > 0, printed
