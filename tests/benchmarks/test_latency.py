"""The latency benchmark runs on real servers, and its spans are parts of the whole."""

import json

import pytest

from benchmarks.latency import FUNCTIONS, SIDES, table
from benchmarks.rounds import Rounds

PROGRAM = """
    import sys

    from benchmarks.latency import main

    main(sys.argv[1:])
"""


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(700)
def test_every_side_reports_its_spans(run_program, tmp_path):
    path = tmp_path / "figures.json"
    program = run_program(PROGRAM, "--quick", "--json", path, timeout=680)
    found = json.loads(path.read_text())["found"]
    assert set(found) == set(FUNCTIONS.values())
    for columns in found.values():
        assert {side: rounds["error"] for side, rounds in columns.items()} == dict.fromkeys(SIDES)
        for rounds in columns.values():
            (spans,) = rounds["figures"]
            assert 0 < spans["start_p50"] < spans["whole_p50"] <= spans["whole_p99"]
            assert 0 < spans["result_p50"] < spans["whole_p50"]
    assert "one assign_add: whole p99" in program.stdout


def test_the_table_has_milliseconds_and_ratios():
    spans = {f"{span}_p{percent}": 0.002 for span in ("schedule", "start", "result", "whole") for percent in (50, 99)}
    slow = {name: 2 * value for name, value in spans.items()}
    columns = {"ours": Rounds([spans]), "peer": Rounds([slow]), "bare": Rounds([slow])}
    _, _, *rows = table({"returns scalars": columns}).splitlines()
    assert len(rows) == len(spans)
    assert {tuple(row.split()[-4:]) for row in rows} == {("2.00", "4.00", "4.00", "0.50")}
