"""The dispatch benchmark runs on real servers, and its table has a row for each workload and number of workers."""

import json

import pytest

from benchmarks.dispatch import FUNCTIONS, SIDES, contest, table
from benchmarks.rounds import Rounds

PROGRAM = """
    import sys

    from benchmarks.dispatch import main

    main(sys.argv[1:])
"""


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(700)
def test_every_side_runs_every_workload(run_program, tmp_path):
    path = tmp_path / "figures.json"
    program = run_program(PROGRAM, "--quick", "--json", path, timeout=680)
    by_title = json.loads(path.read_text())["found"]["1"]
    assert set(by_title) == set(FUNCTIONS.values())
    for columns in by_title.values():
        assert {side: rounds["error"] for side, rounds in columns.items()} == dict.fromkeys(SIDES)
        assert all(each["rate"] > 0 for rounds in columns.values() for each in rounds["figures"])
    assert program.stdout.count(", 1 worker ") == len(FUNCTIONS)


def test_the_table_compares_with_the_peer_and_the_bare_loop():
    rates = {"ours": 3000.0, "runs": 6000.0, "loop": 4500.0, "other loop": 750.0, "peer": 1500.0}
    columns = {side: Rounds([{"rate": rate}]) for side, rate in rates.items()} | {"bare": Rounds(error="Bad: x")}
    _, _, row, _ = table({1: {"nothing": columns}, 2: {"nothing": columns}}).splitlines()
    assert row.startswith("nothing, 1 worker  ")
    assert row.split()[-11:-5] == ["3,000", "6,000", "4,500", "750", "1,500", "Bad"]
    assert row.split()[-5:] == ["2.00", "-", "2.00", "0.75", "0.50"]


def test_each_side_has_one_process_for_all_workloads():
    assert contest(2).sides == SIDES
    assert set(contest(2).rows) == set(FUNCTIONS.values())
