"""The recovery benchmark runs on real processes, prints each outcome in its table, and writes all of them."""

import json

import pytest

from benchmarks.recovery import chosen_faults, main, report, table
from benchmarks.recovery_fault import FAULTS, is_step_of
from benchmarks.recovery_outcome import Event, Outcome

PROGRAM = """
    from benchmarks.recovery import main

    main()
"""


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(500)
def test_a_killed_worker_stops_neither_side(run_program, tmp_path):
    path = tmp_path / "figures.json"
    program = run_program(PROGRAM, "--only", "worker-killed", "--repeats", 1, "--json", path, timeout=480)
    figures = json.loads(path.read_text())
    (fault,) = figures["faults"]
    (ours,), (peer,) = fault["ours"], fault["peer"]
    assert [outcome["error"] for outcome in ours] == [None, None], fault
    assert all(0 < outcome["seconds"] < figures["deadline"] for outcome in (*ours, *peer)), fault
    assert f"{ours[0]['seconds']:.2f} s" in program.stdout
    assert figures["cpus"] > 0
    assert set(figures["versions"]) == {"coordinator", "tensorflow", "keras", "grpcio"}


FOUND = {
    "worker-killed": {"ours": [(Outcome(0.1), Outcome(1.0))], "peer": [(Outcome(0.2), Outcome(3.0))]},
    "ps-restarted": {"ours": [(Outcome(2.0),)], "peer": [(Outcome(error="UnavailableError"),)]},
    "worker-frozen": {"ours": [(Outcome(5.0),)], "peer": [(Outcome(),)]},
}
FOUND_FAULTS = chosen_faults(list(FOUND))


def test_the_table_has_a_row_for_each_thing_that_is_waited_for():
    lines = table(FOUND_FAULTS, FOUND, 60.0).splitlines()[2:]
    assert len(lines) == 4
    assert lines[0].split()[-5:] == ["0.10", "s", "0.20", "s", "2.00"]
    assert lines[1].split()[-5:] == ["1.00", "s", "3.00", "s", "3.00"]


def test_the_table_distinguishes_hanging_from_raising():
    _, _, frozen, lost = table(FOUND_FAULTS, FOUND, 60.0).splitlines()[2:]
    assert frozen.endswith("hangs (deadline 60 s)         > 12")
    assert "raises UnavailableError; restart the client" in lost


def test_the_report_has_every_outcome():
    faults = json.loads(json.dumps(report(FOUND_FAULTS, FOUND, 60.0)))["faults"]
    (frozen,) = (fault for fault in faults if fault["name"] == "worker-frozen")
    assert frozen["ours"] == [[{"seconds": 5.0, "error": None}]]
    assert frozen["peer"] == [[{"seconds": None, "error": None}]]


def test_every_fault_has_a_unique_name_and_something_to_wait_for():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.waits for fault in FAULTS)


def test_faults_are_chosen_by_name():
    assert [fault.name for fault in chosen_faults(["ps-frozen", "worker-killed"])] == ["worker-killed", "ps-frozen"]
    assert chosen_faults(None) == FAULTS


@pytest.mark.parametrize("arguments", [["--only", "flood"], ["--repeats", "0"]])
def test_invalid_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (Event("step", 3.0, began=2.0, worker=0), True),
        (Event("step", 3.0, began=0.5, worker=0), False),
        (Event("step", 3.0, began=2.0, worker=1), False),
        (Event("held", 3.0, began=2.0, worker=0), False),
    ],
)
def test_only_a_step_that_began_after_the_fault_is_useful(event, expected):
    assert is_step_of(event, [0], after=1.0) is expected
