import json
from pathlib import Path

import pytest

from coordinator.cli.command_line import main


def test_one_cluster_gives_a_summary_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--workers", "200", "--ps", "20", "--rule", "bounded_delay", "--max-delay", "8", "--pushes", "2000"]
    assert main(["simulate", *options, "--compute", "lognormal(50ms,0.4)", "--stragglers", "5%"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("cluster        200 workers, 20 ps, bounded_delay(max_delay=8)\nupdates")
    assert "\nnote: max_delay counts updates" in printed


def test_a_trace_shows_the_workers_and_the_pushes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    words = f"--workers 2 --compute 10ms --pushes 100 --deaths 1@0.2s+0.1s --trace {path}"
    options = words.split()
    assert main(["simulate", *options]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    tracks = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert set(tracks.values()) == {"ps 0", "worker 0", "worker 1"}
    slices = [(tracks[each["tid"]], each["name"]) for each in events if each["ph"] == "X"]
    assert set(slices) == {("worker 0", "compute"), ("worker 1", "compute"), ("worker 1", "lost")}
    assert sum(each["name"] == "push" for each in events) >= 100
    assert main(["simulate", *options, "--compare", "asynchronous,synchronous"]) == 2
    assert main(["simulate", "--trace", str(tmp_path / "none" / "trace.json")]) == 2
    assert "trace" in capsys.readouterr().err


def test_a_sweep_gives_a_row_and_a_record_for_each_value(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--compare", "asynchronous,synchronous", "--sweep", "workers=1..4", "--pushes", "100"]
    assert main(["simulate", *options, "--json", str(tmp_path / "out.json")]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[:2] for row in rows] == [
        [rule, value] for rule in ("asynchronous", "synchronous") for value in "124"
    ]
    records = json.loads((tmp_path / "out.json").read_text())
    assert [record["workers"] for record in records] == [1, 2, 4, 1, 2, 4]
