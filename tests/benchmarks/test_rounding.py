"""The benchmark of 16-bit messages runs on real servers, and has a column for each way and a row for each rule."""

import json

import pytest

from benchmarks.rounding import COLUMNS, RULES, accuracy_table, contest, speed_table
from benchmarks.rounds import Rounds

PROGRAM = """
    import sys

    from benchmarks.rounding import main

    main(sys.argv[1:])
"""


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(700)
@pytest.mark.parametrize("part", ["speed", "accuracy"])
def test_a_part_runs_and_returns_its_figures(run_program, tmp_path, part):
    path = tmp_path / "figures.json"
    run_program(PROGRAM, "--quick", "--only", part, "--json", path, timeout=680)
    found = json.loads(path.read_text())["found"][part]
    if part == "accuracy":
        assert list(found) == [choice.name for choice in RULES]
        assert all(0.0 < accuracy < 1.0 for values in found.values() for accuracy in values)
        return
    (columns,) = found.values()
    assert tuple(columns) == tuple(COLUMNS)
    assert all(
        columns[name]["error"] is None and columns[name]["figures"]
        for name, (side, _) in COLUMNS.items()
        if side == "ours"
    )


def test_the_tables_have_rates_ratios_processor_times_and_accuracies():
    columns = {name: Rounds([{"rate": 160.0, "processor": 0.005}]) for name in COLUMNS}
    columns["16 bits"] = Rounds([{"rate": 240.0, "processor": 0.004}])
    lines = speed_table({"layers": columns}).splitlines()
    assert lines[2].split() == ["layers", "240", *["160"] * 5, "1.50", "1.00", "1.50", "1.00"]
    assert lines[-1].split() == ["ms", "of", "processor", "64", *["80"] * 5]
    assert accuracy_table({"32 bits": [0.96, 0.98]}).splitlines()[-1].split() == [
        "32",
        "bits",
        "96.00",
        "98.00",
        "97.00",
    ]


def test_all_sides_run_the_same_step():
    assert contest().sides == ("ours", "peer", "bare")
