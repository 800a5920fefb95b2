import math

import pytest

from coordinator.errors import SettingError
from coordinator.simulation.distribution import Constant, Exponential, LogNormal, RandomDelay
from coordinator.simulation.learning import LogisticRegression
from coordinator.simulation.request import Request, Sweep, parse_sweep
from coordinator.simulation.rules import (
    Asynchronous,
    BoundedDelay,
    Delayed,
    ModelAverage,
    StaleSynchronous,
    Synchronous,
)
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_tasks import Death, Pause


def test_every_option_becomes_a_setting() -> None:
    options = {
        "workers": 5,
        "ps": 2,
        "compute": "lognormal(50ms,0.4)",
        "dispatch": "3ms",
        "latency": "1ms",
        "bandwidth": "10Gbit",
        "model_bytes": "100MB",
        "gradient_bytes": "1MB",
        "service": "1ms",
        "update": "2ms",
        "slow_down": "0:4,3:2.5",
        "stragglers": "20%",
        "straggler_factor": 3.0,
        "slow_steps": "0.01",
        "slow_step_factor": 20.0,
        "pauses": "1@10s+2s,2@0+500ms",
        "deaths": "3@5s,4@6s+1s",
        "detection": "3s",
        "pushes": 100,
        "seconds": "60s",
        "seed": 7,
        "learning_rate": 0.2,
        "problem": "logistic_regression",
    }
    setting = Request.of(options).setting("asynchronous")
    assert (setting.workers, setting.ps, setting.pushes, setting.seconds, setting.seed) == (5, 2, 100, 60.0, 7)
    assert setting.compute == LogNormal(0.05, 0.4)
    assert (setting.bandwidth, setting.model_bytes, setting.pushed_bytes) == (1.25e9, 1e8, 1e6)
    assert [setting.distribution(name).mean for name in ("latency", "service", "dispatch")] == [0.001, 0.001, 0.003]
    assert setting.update == 0.002
    assert setting.slow_down == {0: 4.0, 3: 2.5}
    assert (setting.stragglers, setting.straggler_factor) == (0.2, 3.0)
    assert (setting.slow_steps, setting.slow_step_factor) == (0.01, 20.0)
    assert setting.pauses == [Pause(1, 10.0, 2.0), Pause(2, 0.0, 0.5)]
    assert setting.deaths == [Death(3, 5.0, math.inf), Death(4, 6.0, 1.0)]
    assert setting.detection == 3.0
    assert setting.learning is not None
    assert setting.learning.learning_rate == 0.2
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
        ({"compare": "asynchronous,hogwild"}, "compare must be of asynchronous, .*; got 'hogwild'"),
        ({"compare": "asynchronous", "rule": "synchronous"}, "compare names the rules"),
        ({"rule": "bounded_delay"}, "max_delay must be given"),
        ({"rule": "stale_synchronous", "max_lead": 0}, "max_lead must be an integer of at least 1 .*, got 0"),
        ({"rule": "bounded_delay", "max_delay": "x"}, "max_delay must be an integer or inf, got 'x'"),
        ({"rule": "synchronous", "grads_to_wait": "all"}, "grads_to_wait must be an integer or workers"),
        ({"slow_down": "0=4"}, "slow_down must be WORKER:FACTOR"),
        ({"pauses": "1@2s"}, "pauses must say how long"),
        ({"deaths": "1"}, "deaths must be WORKER@TIME"),
        ({"learning_rate": 0.1, "problem": "imagenet"}, "problem must be one of logistic_regression, small_network"),
        ({"problem": "small_network"}, "problem is learned only with --learning-rate"),
        ({"sweep": "workers=0..4"}, "workers must be an integer of at least 1, got 0"),
    ],
)
def test_the_error_names_a_wrong_option(options, reason: str) -> None:
    with pytest.raises(SettingError, match=f"^{reason}"):  # noqa: PT012 - reading and checking are two steps
        request = Request.of(options)
        request.setting(request.rules[0], request.sweep.values[0] if request.sweep else None)


@pytest.mark.parametrize(
    ("text", "sweep"),
    [
        ("workers=3..20", Sweep("workers", (3, 6, 12, 20))),
        ("max-delay=0..4", Sweep("max_delay", (0, 1, 2, 4))),
        ("ps=8,1,1,3", Sweep("ps", (1, 3, 8))),
    ],
)
def test_a_sweep_is_a_doubling_range_or_a_list(text: str, sweep: Sweep) -> None:
    assert parse_sweep(text) == sweep


@pytest.mark.parametrize("text", ["workers=", "workers=8..1", "workers=a..b", "workers=1,-2"])
def test_a_sweep_without_values_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SettingError, match=r"^sweep must have values such as workers=1\.\.512 or workers=1,8,32"):
        parse_sweep(text)


def test_each_worker_may_have_its_own_computation_time() -> None:
    setting = Setting(workers=3, compute=["20ms", 0.03, LogNormal(0.05, 0.4)])
    assert setting.compute_of_each == (Constant(0.02), Constant(0.03), LogNormal(0.05, 0.4))


def test_the_last_workers_are_the_stragglers_and_factors_multiply() -> None:
    setting = Setting(workers=10, stragglers=0.2, straggler_factor=3.0, slow_down={0: 2.0, 9: 2.0})
    assert setting.factors == (2.0, *[1.0] * 7, 3.0, 6.0)


def test_the_simulation_ends_after_enough_pushes_by_default() -> None:
    assert Setting().pushes == 20_000
    assert Setting(workers=1000).pushes == 100_000
    assert Setting(seconds=1.0).pushes is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"workers": 0}, "workers must be an integer of at least 1, got 0"),
        ({"pushes": 0}, "pushes must be an integer of at least 1"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"rule": "asynchronous"}, "rule must be a rule such as"),
        ({"workers": 2, "compute": [0.1]}, "compute must be one distribution, or one for each of 2 workers; has 1"),
        ({"latency": -0.1}, "latency must be a number of seconds of at least 0, a text or a distribution"),
        ({"stragglers": 1.5}, "stragglers must be a number from 0 to 1"),
        ({"bandwidth": 0}, "bandwidth must be a number above 0"),
        ({"update": math.nan}, "update must be a number of at least 0"),
        ({"slow_down": {0: 0.0}}, "slow_down must have factors above 0"),
        ({"slow_down": {4: 2.0}}, "slow_down must name workers from 0 to 3, got 4"),
        ({"deaths": [Death(9, 0.0)]}, "deaths must name workers from 0 to 3, got 9"),
        ({"compute": 0.0, "seconds": 1.0}, "compute must be above 0"),
    ],
)
def test_an_invalid_setting_is_refused_with_the_allowed_values(given, reason: str) -> None:
    with pytest.raises(SettingError, match=f"^{reason}"):
        Setting(**given)
