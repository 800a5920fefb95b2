"""The benchmark of data runs on real servers, and its table has a row for each kind of data."""

import json

import pytest

from benchmarks.data import HANDED_OUT, SLOW_WAYS, WAYS, table
from benchmarks.rounds import Rounds

PROGRAM = """
    import sys

    from benchmarks.data import main

    main(sys.argv[1:])
"""


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(300)
def test_every_way_runs(run_program, tmp_path):
    path = tmp_path / "figures.json"
    program = run_program(PROGRAM, "--quick", "--json", path, timeout=280)
    found = json.loads(path.read_text())["found"]
    assert set(found) == {"in memory", "TFRecord", "0 ms", "5 ms", "50 ms", HANDED_OUT}
    assert not [rounds["error"] for columns in found.values() for rounds in columns.values() if rounds["error"]]
    assert "a range is handed out in " in program.stdout


def test_the_table_compares_with_endless_iterators():
    rates = dict(zip(WAYS, (Rounds([{"rate": rate}]) for rate in (2000.0, 1800.0, 1000.0)), strict=True))
    slow = {way: Rounds([{"rate": 10.0 * number}]) for number, way in enumerate(SLOW_WAYS, 1)}
    found = {"TFRecord": rates, "5 ms": slow, HANDED_OUT: {"ranges": Rounds([{"us": 8.25}])}}
    _, _, row, _, _, slow_row, last = table(found).splitlines()
    assert row.split() == ["TFRecord", "2,000", "1,800", "1,000", "0.90", "0.50"]
    assert slow_row.split() == ["5", "ms", "10", "20", "30", "40", "50", "1.33", "1.67"]
    assert last == "a range is handed out in 8.2 us"
