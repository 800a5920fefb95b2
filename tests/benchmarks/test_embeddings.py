"""The benchmark of sparse updates runs on real servers, on all sides."""

import json

import pytest

from benchmarks.embeddings import CASES, QUICK_BATCHES, QUICK_CASES, SHARDED_SIDES, SIDES, contest, table
from benchmarks.rounds import Rounds

PROGRAM = """
    import sys

    from benchmarks.embeddings import main

    main(sys.argv[1:])
"""


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(700)
def test_every_side_updates_a_table(run_program, tmp_path):
    path = tmp_path / "figures.json"
    run_program(PROGRAM, "--quick", "--json", path, timeout=680)
    found = json.loads(path.read_text())["found"]
    cases = {**dict.fromkeys(QUICK_CASES, SIDES), **{f"batch {size}": SHARDED_SIDES for size in QUICK_BATCHES}}
    assert set(found) == set(cases)
    for case, columns in found.items():
        assert {side: rounds["error"] for side, rounds in columns.items()} == dict.fromkeys(cases[case])
        for rounds in columns.values():
            assert all(value > 0 for figures in rounds["figures"] for value in figures.values())


def test_the_table_has_milliseconds_and_how_often_ours_is_as_fast():
    slow, fast = Rounds([{"seconds": 0.5}]), Rounds([{"seconds": 0.01}])
    found = {"Adam 1000000 64": {"ours": fast, "dense": slow, "peer": slow}, "Adam 4000000 64": {"ours": fast}}
    whole, alone = (row.split() for row in table(found).splitlines()[2:])
    assert whole == ["Adam,", "1,000,000", "x", "64", "10.0", "500.0", "500.0", "50.00", "50.00"]
    assert alone[-5:] == ["10.0", *"----"]


def test_this_library_runs_every_case():
    assert [set(columns) >= {"ours"} for columns in contest().rows.values()] == [True] * len(CASES)
