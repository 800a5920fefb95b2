"""Tests of options, settings and distributions, and of simulations of a training from its trace."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from coordinator.cli.command_line import main
from coordinator.errors import SettingError
from coordinator.events.trace import TraceFile
from coordinator.simulation.distribution import (
    Constant,
    Distribution,
    Empirical,
    Exponential,
    LogNormal,
    Normal,
    Pareto,
    RandomDelay,
    Slowed,
    distribution_of,
    parse_bytes,
    parse_delay,
    parse_rate,
    parse_seconds,
    parse_share,
)
from coordinator.simulation.learning import LogisticRegression
from coordinator.simulation.request import Request, Sweep, calibration, parse_sweep
from coordinator.simulation.rules import (
    Asynchronous,
    BoundedDelay,
    Delayed,
    ModelAverage,
    StaleSynchronous,
    Synchronous,
)
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate
from coordinator.simulation.simulated_tasks import Death, Pause


def test_every_option_becomes_a_setting() -> None:
    given = {
        "workers=5": {"workers": 5},
        "compute=lognormal(50ms,0.4)": {"compute": LogNormal(0.05, 0.4)},
        "update=2ms": {"update": 0.002},
        "bandwidth=10Gbit": {"bandwidth": 1.25e9},
        "model_bytes=100MB": {"model_bytes": 1e8},
        "gradient_bytes=1MB": {"pushed_bytes": 1e6},
        "slow_down=0:4,3:2.5": {"slow_down": {0: 4.0, 3: 2.5}},
        "stragglers=20%": {"stragglers": 0.2},
        "slow_steps=0.01": {"slow_steps": 0.01},
        "pauses=1@10s+2s,2@0+500ms": {"pauses": [Pause(1, 10.0, 2.0), Pause(2, 0.0, 0.5)]},
        "deaths=3@5s,4@6s+1s": {"deaths": [Death(3, 5.0, math.inf), Death(4, 6.0, 1.0)]},
        "detection=3s": {"detection": 3.0},
        "seconds=60s": {"seconds": 60.0},
    }
    options: dict[str, object] = {"ps": 2, "learning_rate": 0.2, "problem": "logistic_regression"}
    options |= dict(text.split("=", 1) for text in given) | {"latency": "1ms", "service": "1ms", "workers": 5}
    setting = Request.of(options).setting("asynchronous")
    for expected in given.values():
        assert {name: getattr(setting, name) for name in expected} == expected
    assert [setting.distribution(name).mean for name in ("latency", "service")] == [0.001, 0.001]
    assert setting.learning is not None
    assert (setting.ps, setting.learning.learning_rate) == (2, 0.2)
    assert isinstance(setting.learning.problem, LogisticRegression)


@pytest.mark.parametrize(
    ("rule", "options", "expected"),
    [
        ("asynchronous", {"lr_staleness_modulation": True, "max_delay": "3"}, Asynchronous(True)),
        ("synchronous", {"workers": 6, "grads_to_wait": "5"}, Synchronous(5)),
        ("bounded_delay", {"max_delay": "inf", "grads_to_wait": "workers"}, BoundedDelay(math.inf, 4)),
        ("stale_synchronous", {"get_model_frequency": 3, "max_lead": 2}, StaleSynchronous(3, 2)),
        ("model_average", {"period": "200ms", "warmup_steps": 5}, ModelAverage(0.2, 5)),
        ("delayed", {"delay": "inf"}, Delayed(math.inf)),
        (
            "delayed",
            {"delay": "exponential(1s)", "seed": 7},
            Delayed(RandomDelay((Exponential(1.0),), "exponential(1s)", 7)),
        ),
    ],
)
def test_a_rule_takes_the_options_that_it_has(rule: str, options, expected) -> None:
    assert Request.of({"rule": rule, **options}).setting(rule).rule == expected


def test_a_sweep_changes_one_setting_and_those_derived_from_it() -> None:
    request = Request.of({"compare": "synchronous, asynchronous", "sweep": "workers=2..8", "ps": 3})
    assert request.rules == ("synchronous", "asynchronous")
    assert request.sweep is not None
    settings = [request.setting("synchronous", value) for value in request.sweep.values]
    assert [setting.workers for setting in settings] == [2, 4, 8]
    assert [setting.rule for setting in settings] == [Synchronous(2), Synchronous(4), Synchronous(8)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rule": "hogwild"}, "rule must be of asynchronous, .*; got 'hogwild'"),
        ({"compare": "asynchronous", "rule": "synchronous"}, "compare names the rules"),
        ({"rule": "stale_synchronous", "max_lead": 0}, "max_lead must be an integer of at least 1 .*, got 0"),
        ({"rule": "bounded_delay", "max_delay": "x"}, "max_delay must be an integer or inf, got 'x'"),
        ({"pauses": "1@2s"}, "pauses must say how long"),
        ({"learning_rate": 0.1, "problem": "imagenet"}, "problem must be one of logistic_regression, small_network"),
        ({"sweep": "workers=0..4"}, "workers must be an integer of at least 1, got 0"),
    ],
)
def test_the_error_names_a_wrong_option(options, reason: str) -> None:
    with pytest.raises(SettingError, match=f"^{reason}"):  # noqa: PT012 - reading and checking are two steps
        request = Request.of(options)
        request.setting(request.rules[0], request.sweep.values[0] if request.sweep else None)


def test_a_sweep_is_a_doubling_range_or_a_list_or_refused_with_an_example() -> None:
    assert parse_sweep("workers=3..20") == Sweep("workers", (3, 6, 12, 20))
    assert parse_sweep("max-delay=0..4") == Sweep("max_delay", (0, 1, 2, 4))
    assert parse_sweep("ps=8,1,1,3") == Sweep("ps", (1, 3, 8))
    for text in ("workers=", "workers=8..1", "workers=a..b", "workers=1,-2"):
        with pytest.raises(SettingError, match=r"^sweep must have values such as workers=1\.\.512 or workers=1,8,32"):
            parse_sweep(text)


def test_workers_may_have_their_own_times_and_the_last_are_the_stragglers() -> None:
    setting = Setting(workers=3, compute=["20ms", 0.03, LogNormal(0.05, 0.4)])
    assert setting.compute_of_each == (Constant(0.02), Constant(0.03), LogNormal(0.05, 0.4))
    setting = Setting(workers=10, stragglers=0.2, straggler_factor=3.0, slow_down={0: 2.0, 9: 2.0})
    assert setting.factors == (2.0, *[1.0] * 7, 3.0, 6.0)
    # The simulation ends after enough pushes by default.
    assert [Setting().pushes, Setting(workers=1000).pushes, Setting(seconds=1.0).pushes] == [20_000, 100_000, None]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"workers": 0}, "workers must be an integer of at least 1, got 0"),
        ({"rule": "asynchronous"}, "rule must be a rule such as"),
        ({"workers": 2, "compute": [0.1]}, "compute must be one distribution, or one for each of 2 workers; has 1"),
        ({"slow_down": {4: 2.0}}, "slow_down must name workers from 0 to 3, got 4"),
        ({"deaths": [Death(9, 0.0)]}, "deaths must name workers from 0 to 3, got 9"),
        ({"compute": 0.0, "seconds": 1.0}, "compute must be above 0"),
    ],
)
def test_an_invalid_setting_is_refused_with_the_allowed_values(given, reason: str) -> None:
    with pytest.raises(SettingError, match=f"^{reason}"):
        Setting(**given)


ALL = [
    Constant(0.02),
    Normal(0.01, 0.02),
    Exponential(0.03),
    LogNormal(0.05, 0.4),
    Pareto(0.02, 3.5),
    Empirical((0.01, 0.02, 0.06)),
    Slowed(Constant(0.02), 0.1, 10.0),
]


@pytest.mark.parametrize("distribution", ALL, ids=str)
def test_samples_have_the_stated_mean_and_are_never_negative(distribution: Distribution) -> None:
    times = distribution.sample(np.random.default_rng(0), 200_000)
    assert times.shape == (200_000,)
    assert times.dtype == np.float64
    assert times.min() >= 0
    assert times.mean() == pytest.approx(distribution.mean, rel=0.02)


def test_invalid_parameters_of_a_distribution_are_refused() -> None:
    for kind, given in (
        (Constant, (-1.0,)),
        (Exponential, (math.nan,)),
        (LogNormal, (0.1, math.inf)),
        (Empirical, ((),)),
    ):
        with pytest.raises(SettingError, match=r"of a distribution \w+ must be"):
            kind(*given)


def test_a_text_or_a_number_is_converted_to_a_distribution() -> None:
    for given, expected in (
        (0.5, Constant(0.5)),
        (" normal(50ms, 5ms) ", Normal(0.05, 0.005)),
        ("empirical(20ms,25ms,1s)", Empirical((0.02, 0.025, 1.0))),
    ):
        assert distribution_of("compute", given) == expected


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("weibull(1s,2)", r"has no distribution 'weibull'; it may be one of constant\(20ms\)"),
        ("lognormal(50ms)", r"must be of the form lognormal\(50ms,0\.4\)"),
        ("pareto(50ms,-1)", r"'pareto\(50ms,-1\)': shape of a distribution Pareto must be a number of at least 0"),
        (-0.1, "must be a number of seconds of at least 0, a text or a distribution, got -0.1"),
    ],
)
def test_an_invalid_text_is_refused_with_the_option_and_the_allowed_forms(given, reason: str) -> None:
    with pytest.raises(SettingError, match=f"^compute {reason}"):
        distribution_of("compute", given)


def test_a_quantity_is_read_with_its_unit_or_refused_with_the_name_of_its_option() -> None:
    for read, text, expected in (
        (parse_seconds, "200us", 200e-6),
        (parse_seconds, "1e-3s", 1e-3),
        (parse_bytes, "500kB", 5e5),
        (parse_rate, "10Gbit", 1.25e9),
        (parse_rate, "inf", float("inf")),
        (parse_share, "5%", 0.05),
    ):
        assert read("option", text) == pytest.approx(expected), text
    for read, text in ((parse_seconds, "50"), (parse_bytes, "5mb"), (parse_share, "150%")):
        with pytest.raises(SettingError, match=f"^latency must be .*, such as .*, got '{text}'"):
            read("latency", text)


def test_a_delay_is_a_distribution_or_one_for_each_worker() -> None:
    for text, each in (
        ("lognormal(100ms, 1.0)", (LogNormal(0.1, 1.0),)),
        ("0/exponential(0.5s)", (Constant(0.0), Exponential(0.5))),
    ):
        delay = parse_delay("delay", text)
        assert isinstance(delay, RandomDelay)
        assert (delay.each, repr(delay)) == (each, text.replace(" ", ""))
        assert delay.mean == pytest.approx(np.mean([part.mean for part in each]))


def test_the_delay_of_a_push_depends_on_worker_time_and_seed_alone() -> None:
    delay, other = (RandomDelay((Exponential(1.0),), "", seed) for seed in (1, 2))
    assert delay(0, 0.5) == delay(0, 0.5)
    assert len({delay(0, 0.5), delay(1, 0.5), delay(0, 0.6), other(0, 0.5)}) == 4
    drawn = [delay(worker, 0.1 * step) for worker in range(10) for step in range(300)]
    assert np.mean(drawn) == pytest.approx(1.0, rel=0.1)


def test_a_late_worker_makes_its_own_gradients_stale_alone() -> None:
    rule = Delayed(RandomDelay((Constant(0.0), Exponential(2.0)), ""))
    setting = Setting(workers=2, rule=rule, compute=0.1, latency=0.01, seconds=60.0)
    result = simulate(setting)
    quick, late = (result.staleness[result.push_workers == worker].mean() for worker in (0, 1))
    assert quick < 3
    # In two seconds the workers apply about 2 * 2 / 0.14 gradients.
    assert late == pytest.approx(2 * 2 / 0.14, rel=0.3)
    assert simulate(setting).staleness.tolist() == result.staleness.tolist()


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
