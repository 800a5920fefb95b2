"""The benchmark of pauses runs on real servers, and a pause is shorter than the time in which it is."""

import json

import pytest

from benchmarks.pauses import QUICK_SECONDS, SIDES, table
from benchmarks.rounds import Rounds

PROGRAM = """
    import sys

    from benchmarks.pauses import main

    main(sys.argv[1:])
"""


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(700)
def test_every_side_reports_its_longest_pause(run_program, tmp_path):
    path = tmp_path / "figures.json"
    program = run_program(PROGRAM, "--quick", "--json", path, timeout=680)
    (columns,) = json.loads(path.read_text())["found"].values()
    assert {side: rounds["error"] for side, rounds in columns.items()} == dict.fromkeys(SIDES)
    for rounds in columns.values():
        (figures,) = rounds["figures"]
        assert 0 < figures["pause"] <= 2 * QUICK_SECONDS
    assert "longest pause, s" in program.stdout


def test_the_table_has_seconds_and_ratios():
    columns = {"ours": Rounds([{"pause": 0.1, "steps": 500.0}]), "peer": Rounds([{"pause": 0.2, "steps": 250.0}])}
    _, _, *rows = table({"batch 32": columns}).splitlines()
    assert [row.split()[-3:] for row in rows] == [["0.100", "0.200", "0.50"], ["500", "250", "2.00"]]
