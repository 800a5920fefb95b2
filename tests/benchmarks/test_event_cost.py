"""The benchmark of the cost of events runs on real servers, and its table compares rounds with events and without."""

import json

import pytest

from benchmarks.event_cost import ROWS, table
from benchmarks.rounds import Rounds

PROGRAM = """
    import sys

    from benchmarks.event_cost import main

    main(sys.argv[1:])
"""


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(200)
def test_rounds_with_events_record_them_and_others_do_not(run_program, tmp_path):
    path = tmp_path / "figures.json"
    program = run_program(PROGRAM, "--quick", "--json", path, timeout=180)
    found = json.loads(path.read_text())["found"]
    assert 0 < found["record"] < 0.001
    assert tuple(found["rounds"]) == ROWS
    for row, sides in found["rounds"].items():
        assert [each["events"] for each in sides["without"]["figures"]] == [0]
        (with_events,) = sides["with"]["figures"]
        assert with_events["events"] == 2 if "one in a call" in row else 0 < with_events["events"] < 2
        assert with_events["rate"] > 0
        assert with_events["cpu"] > 0
    assert "quartiles" in program.stdout


def test_ratios_are_of_rounds_that_were_made_one_after_the_other():
    def rounds(rates, cpu, events):
        return Rounds([{"rate": rate, "cpu": cpu, "events": events} for rate in rates])

    columns = {"without": rounds((100.0, 200.0, 400.0), 1e-5, 0.0), "with": rounds((99.0, 180.0, 400.0), 2e-5, 2.0)}
    row = table({"nothing": columns}, 1e-6).splitlines()[-1].split()
    assert row[1:7] == ["200", "180", "0.990", "0.945", "to", "0.995"]
    assert row[7:] == ["10.00", "20.00", "2.000", "2.000", "to", "2.000", "2.000", "0.04%"]
