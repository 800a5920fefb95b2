"""The benchmark of a worker's devices runs on real servers, and its table compares replicas with one device."""

import json

import pytest

from benchmarks.devices import COLUMNS, table
from benchmarks.rounds import Rounds

PROGRAM = """
    import sys

    from benchmarks.devices import main

    main(sys.argv[1:])
"""


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(700)
def test_every_side_trains(run_program, tmp_path):
    path = tmp_path / "figures.json"
    run_program(PROGRAM, "--quick", "--json", path, timeout=680)
    (columns,) = json.loads(path.read_text())["found"].values()
    assert {side: rounds["error"] for side, rounds in columns.items()} == dict.fromkeys(COLUMNS)
    assert all(each["rate"] > 0 for rounds in columns.values() for each in rounds["figures"])


def test_the_table_compares_replicas_with_one_device_and_the_peer():
    rates = {"one device": 4000.0, "two devices": 3000.0, "peer": 2000.0}
    row = table({"digits": {column: Rounds([{"rate": rate}]) for column, rate in rates.items()}}).splitlines()[-1]
    assert row.split() == ["digits", "4,000", "3,000", "2,000", "2.00", "1.50", "0.75"]
