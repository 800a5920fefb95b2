"""The benchmark of the core's scale runs, and its tables have a row for each load."""

import json

import pytest

from benchmarks.scale import Scale, main, queue_table, runs_table, workers_table


@pytest.mark.long
def test_the_core_is_measured_with_workers_and_with_a_full_queue(tmp_path, capsys):
    path = tmp_path / "figures.json"
    main(["--quick", "--json", str(path)])
    figures = json.loads(path.read_text())
    assert figures["benchmark"] == "scale"
    assert figures["cpus"] > 0
    for rounds in (each for load in ("busy", "loop", "runs") for each in figures["found"][load].values()):
        assert [set(each) for each in rounds] == [{"wall", "cpu", "switches"}]
        assert all(value > 0 for each in rounds for value in each.values())
    (queued,) = figures["found"]["queued"]
    assert queued["bytes"] > 0
    assert 0 < queued["schedule_p50"] <= queued["schedule_p99"]
    assert "64" in capsys.readouterr().out


def test_the_tables_have_medians_and_growth():
    def rounds(cpu):
        return [{"wall": 2e-5, "cpu": each, "switches": 1.5} for each in (cpu, cpu, 1.0)]

    queued = [{"bytes": 480.0, "schedule_p50": 2e-5, "schedule_p99": 1e-4}]
    found = Scale({4: rounds(2e-5), 64: rounds(3e-5)}, {4: rounds(1e-5), 64: rounds(1e-5)}, {4: rounds(1e-6)}, queued)
    _, _, few, many = workers_table(found).splitlines()
    assert few.split() == ["4", "50,000", "4,000", "20.0", "10.0", "1.00", "1.50", "1.50"]
    assert many.split() == ["64", "50,000", "64,000", "30.0", "10.0", "1.50", "1.50", "1.50"]
    assert runs_table(found).splitlines()[-1].split() == ["4", "50,000", "1.00"]
    assert queue_table(found, 1000).splitlines()[-1].split() == ["1,000", "480", "20.0", "100.0"]


def test_invalid_arguments_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--repeats", "0"])
    assert "--repeats" in capsys.readouterr().err
