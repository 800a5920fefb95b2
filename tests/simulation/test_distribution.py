import math

import numpy as np
import pytest

from coordinator.errors import SettingError
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
from coordinator.simulation.rules import Delayed
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate

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


@pytest.mark.parametrize(
    "make",
    [
        lambda: Constant(-1.0),
        lambda: Exponential(math.nan),
        lambda: LogNormal(0.1, math.inf),
        lambda: Empirical(()),
    ],
)
def test_invalid_parameters_of_a_distribution_are_refused(make) -> None:
    with pytest.raises(SettingError, match=r"of a distribution \w+ must be"):
        make()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("20ms", Constant(0.02)),
        (0.5, Constant(0.5)),
        ("normal(50ms, 5ms)", Normal(0.05, 0.005)),
        ("lognormal(50ms,0.4)", LogNormal(0.05, 0.4)),
        (" pareto(20ms,2.5) ", Pareto(0.02, 2.5)),
        ("empirical(20ms,25ms,1s)", Empirical((0.02, 0.025, 1.0))),
    ],
)
def test_a_text_or_a_number_is_converted_to_a_distribution(given, expected: Distribution) -> None:
    assert distribution_of("compute", given) == expected


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("weibull(1s,2)", r"has no distribution 'weibull'; it may be one of constant\(20ms\)"),
        ("lognormal(50ms)", r"must be of the form lognormal\(50ms,0\.4\)"),
        ("lognormal(50,0.4)", r"must be a time of at least 0 with its unit, such as 200us, 50ms or 1\.5s, got '50'"),
        ("pareto(50ms,-1)", r"'pareto\(50ms,-1\)': shape of a distribution Pareto must be a number of at least 0"),
        ("soon", "must be a time such as 20ms, or one of"),
        (-0.1, "must be a number of seconds of at least 0, a text or a distribution, got -0.1"),
    ],
)
def test_an_invalid_text_is_refused_with_the_option_and_the_allowed_forms(given, reason: str) -> None:
    with pytest.raises(SettingError, match=f"^compute {reason}"):
        distribution_of("compute", given)


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (parse_seconds, "200us", 200e-6),
        (parse_seconds, "50 ms", 0.05),
        (parse_seconds, "1e-3s", 1e-3),
        (parse_bytes, "500kB", 5e5),
        (parse_rate, "10Gbit", 1.25e9),
        (parse_rate, "100MB", 1e8),
        (parse_rate, "inf", float("inf")),
        (parse_share, "5%", 0.05),
        (parse_share, "0.25", 0.25),
    ],
)
def test_a_quantity_is_read_with_its_unit(read, text: str, expected: float) -> None:
    assert read("option", text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (parse_seconds, "50"),
        (parse_seconds, "-5ms"),
        (parse_bytes, "5mb"),
        (parse_rate, "5ms"),
        (parse_share, "150%"),
    ],
)
def test_an_invalid_quantity_is_refused_with_the_name_of_its_option(read, text: str) -> None:
    with pytest.raises(SettingError, match=f"^latency must be .*, such as .*, got '{text}'"):
        read("latency", text)


@pytest.mark.parametrize(
    ("text", "each"),
    [
        ("lognormal(100ms, 1.0)", (LogNormal(0.1, 1.0),)),
        ("0/exponential(0.5s)", (Constant(0.0), Exponential(0.5))),
        ("0.1s / 0.2s", (Constant(0.1), Constant(0.2))),
    ],
)
def test_a_delay_is_a_distribution_or_one_for_each_worker(text: str, each: tuple) -> None:
    delay = parse_delay("delay", text)
    assert isinstance(delay, RandomDelay)
    assert delay.each == each
    assert repr(delay) == text.replace(" ", "")
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
