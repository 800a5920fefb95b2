"""The dense benchmark runs on real servers; a side that cannot run the step is reported as an error."""

import json

import pytest

from benchmarks.dense import SIDES, contest, table
from benchmarks.rounds import Rounds

PROGRAM = """
    import sys

    from benchmarks.dense import main

    main(sys.argv[1:])
"""


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(700)
def test_this_library_trains_and_the_table_has_every_side(run_program, tmp_path):
    path = tmp_path / "figures.json"
    run_program(PROGRAM, "--quick", "--json", path, timeout=680)
    (columns,) = json.loads(path.read_text())["found"].values()
    assert tuple(columns) == SIDES
    assert [rounds["error"] for side, rounds in columns.items() if side in ("ours", "single")] == [None, None]
    assert all(rounds["error"] or rounds["figures"] for rounds in columns.values())


def test_a_side_that_cannot_run_has_its_error_in_the_table():
    good = Rounds([{"rate": 2000.0}])
    columns = {"ours": good, "peer": Rounds(error="ValueError: not so"), "bare": good, "single": good}
    assert table({"digits": columns}).splitlines()[-1].split() == [
        *("digits", "2,000", "ValueError", "2,000", "2,000"),
        *("-", "1.00", "1.00"),
    ]


def test_all_sides_run_the_same_step():
    assert contest().sides == SIDES
