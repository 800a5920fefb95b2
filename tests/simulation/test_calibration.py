"""Simulations of a training from its trace."""

import json
from pathlib import Path

import pytest

from coordinator.cli.command_line import main
from coordinator.errors import SettingError
from coordinator.events.trace import TraceFile
from coordinator.simulation import Setting, simulate
from coordinator.simulation.request import calibration


def _add_calls(file: TraceFile, seconds: float, interval: float, closures: int, begin: float = 0.0) -> None:
    """Adds 200 calls of each of two workers, which begin `interval` seconds after each other."""
    for call in range(200):
        for worker in range(2):
            details = {"closures": closures, "outcome": "finished"}
            file.slice(f"worker {worker}", "step", begin + interval * call, seconds, details)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A trace of two workers, with calls of two steps of 40 ms, 20 ms apart, and of a server that is half busy."""
    path = tmp_path / "trace.json"
    file = TraceFile(path, "training", 1)
    _add_calls(file, seconds=0.08, interval=0.1, closures=2, begin=1.0)
    file.slice("worker 1", "step", 0.0, 0.9, {"closures": 1, "outcome": "run again"})
    file.instant("ps 0", "the trace begins", 0.0)
    for second in (1, 2):
        file.counter("busy", second, {"parameter server 0": 0.5, "the client": 0.1})
    file.close()
    return path


def test_the_simulation_is_as_fast_as_the_training(path: Path) -> None:
    found = calibration(path)
    assert (found.load.workers, found.load.busiest.name) == (2, "parameter server 0")
    assert found.load.rate == pytest.approx(40.0, rel=0.01)
    assert found.load.idle == pytest.approx(0.2, abs=0.01)
    result = simulate(Setting(**found.settings))
    assert result.gradients_per_second == pytest.approx(40.0, rel=0.15)
    assert result.queue.utilization == pytest.approx(0.5, rel=0.15)
    # The server is busy for 12.5 ms of each step.
    most = simulate(Setting(**found.settings | {"workers": 16}))
    assert most.gradients_per_second == pytest.approx(80.0, rel=0.05)


def test_the_command_compares_numbers_of_workers(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--from-trace", str(path), "--sweep", "workers=2,8", "--pushes", "2000"]) == 0
    *table, advice = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in table[2:]] == [["asynchronous", "2"], ["asynchronous", "8"]]
    assert advice.startswith("advice: 2 more workers would bring ")
    assert advice.endswith("; parameter server 0 is the bottleneck (50%).")
    assert main(["simulate", "--from-trace", str(path), "--rule", "synchronous", "--pushes", "100"]) == 0
    assert "synchronous(grads_to_wait=2)" in capsys.readouterr().out


def test_a_host_without_time_to_spare_is_simulated_as_fast_as_the_training(tmp_path: Path) -> None:
    """Of a step of 50 ms, 24.5 ms are for the host's processors, 10 ms of them for the parameter server."""
    path = tmp_path / "trace.json"
    file = TraceFile(path, "training", 1)
    _add_calls(file, seconds=0.05, interval=0.05, closures=1)
    for second in (2, 4):
        file.counter("busy", second, {"parameter server 0": 0.4, "the processors of host a": 0.98})
    file.close()
    found = calibration(path)
    assert found.load.busiest.name == "the processors of host a"
    rates = {
        workers: simulate(Setting(**found.settings | {"workers": workers})).gradients_per_second
        for workers in (1, 2, 8)
    }
    assert rates[2] == pytest.approx(40.0, rel=0.15)
    assert rates[8] == pytest.approx(40.0 / 0.98, rel=0.05)
    assert 20.0 < rates[1] < 40.0


def test_what_is_no_trace_of_a_training_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(SettingError, match="cannot read the trace"):
        calibration(path)
    path.write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(SettingError, match="no finished call"):
        calibration(path)
