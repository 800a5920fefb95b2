"""The startup benchmark runs on real servers; importing the library loads no TensorFlow."""

import json

import pytest

from benchmarks.rounds import Rounds
from benchmarks.startup import SIDES, import_seconds, table

PROGRAM = """
    import sys

    from benchmarks.startup import main

    main(sys.argv[1:])
"""


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(700)
def test_both_sides_connect(run_program, tmp_path):
    path = tmp_path / "figures.json"
    run_program(PROGRAM, "--quick", "--json", path, timeout=680, fresh=True)
    found = json.loads(path.read_text())["found"]
    assert list(found) == ["import coordinator / tensorflow", "connect to 2 workers, 1 ps"]
    for columns in found.values():
        assert {side: rounds["error"] for side, rounds in columns.items()} == dict.fromkeys(SIDES)
        assert all(each["seconds"] > 0 for rounds in columns.values() for each in rounds["figures"])
    for rounds in found["connect to 2 workers, 1 ps"].values():
        assert all(each["first_result"] > each["seconds"] for each in rounds["figures"])


def test_importing_the_library_is_timed_and_loads_no_tensorflow():
    figures = import_seconds("coordinator")["figures"]
    assert figures["seconds"] > 0
    assert figures["loads_tensorflow"] is False


def test_a_module_that_cannot_be_imported_is_an_error_in_the_table():
    answer = import_seconds("no_such_module_anywhere")
    assert "ModuleNotFoundError" in answer["error"]
    rounds = Rounds()
    rounds.note(answer)
    row = table({"import": {"ours": Rounds([{"seconds": 0.5}]), "peer": rounds}}).splitlines()[-1]
    assert row.split("  ")[-1].strip() == "-"
    assert "ended with code 1" in row
