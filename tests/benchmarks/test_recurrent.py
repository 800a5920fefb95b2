"""The benchmark of recurrent models runs on real servers; what a side cannot run is reported as an error."""

import json

import pytest

from benchmarks.recurrent import ROWS, SIDES, contest

PROGRAM = """
    import sys

    from benchmarks.recurrent import main

    main(sys.argv[1:])
"""


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(700)
def test_this_library_and_one_process_run_all_models(run_program, tmp_path):
    path = tmp_path / "figures.json"
    run_program(PROGRAM, "--quick", "--json", path, timeout=680)
    found = json.loads(path.read_text())["found"]
    assert tuple(found) == ROWS
    for columns in found.values():
        assert tuple(columns) == SIDES
        assert all(columns[side]["error"] is None and columns[side]["figures"] for side in ("ours", "single"))


def test_all_sides_run_the_same_models():
    assert contest().sides == SIDES
    assert tuple(contest().rows) == ROWS
