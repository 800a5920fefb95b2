import math

import numpy as np
import pytest

from coordinator.errors import SettingError
from coordinator.simulation.distribution import (
    FORMS,
    Constant,
    Distribution,
    Empirical,
    Exponential,
    LogNormal,
    Normal,
    Pareto,
    Slowed,
    distribution_of,
)

ALL = [
    Constant(0.02),
    Normal(0.05, 0.005),
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


@pytest.mark.parametrize("distribution", ALL, ids=str)
def test_drawing_one_at_a_time_equals_drawing_in_blocks(distribution: Distribution) -> None:
    draw = distribution.sampler(np.random.default_rng(3))
    generator = np.random.default_rng(3)
    blocks = np.concatenate([distribution.sample(generator, 4096) for _ in range(2)])
    assert [draw() for _ in range(5000)] == blocks[:5000].tolist()


def test_a_lognormal_has_its_median_and_the_deviation_of_its_logarithm() -> None:
    times = LogNormal(0.05, 0.4).sample(np.random.default_rng(0), 200_000)
    assert np.median(times) == pytest.approx(0.05, rel=0.01)
    assert np.log(times).std() == pytest.approx(0.4, rel=0.01)


def test_a_pareto_has_the_tail_that_it_states() -> None:
    times = Pareto(0.02, 2.5).sample(np.random.default_rng(0), 200_000)
    assert times.min() >= 0.02
    assert (times > 0.1).mean() == pytest.approx((0.02 / 0.1) ** 2.5, rel=0.05)
    assert Pareto(0.02, 1.0).mean == math.inf


@pytest.mark.parametrize(
    "make",
    [
        lambda: Constant(-1.0),
        lambda: Normal(0.1, -0.1),
        lambda: Exponential(math.nan),
        lambda: LogNormal(0.1, math.inf),
        lambda: Pareto(0.1, 0.0),
        lambda: Empirical(()),
        lambda: Empirical((0.1, -0.1)),
    ],
)
def test_invalid_parameters_of_a_distribution_are_refused(make) -> None:
    with pytest.raises(SettingError, match=r"of a distribution \w+ must be"):
        make()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("constant(20ms)", Constant(0.02)),
        ("20ms", Constant(0.02)),
        ("0", Constant(0.0)),
        (0.5, Constant(0.5)),
        ("normal(50ms, 5ms)", Normal(0.05, 0.005)),
        ("exponential(30ms)", Exponential(0.03)),
        ("lognormal(50ms,0.4)", LogNormal(0.05, 0.4)),
        (" pareto(20ms,2.5) ", Pareto(0.02, 2.5)),
        ("empirical(20ms,25ms,1s)", Empirical((0.02, 0.025, 1.0))),
        (Exponential(1.0), Exponential(1.0)),
    ],
)
def test_a_text_or_a_number_is_converted_to_a_distribution(given, expected: Distribution) -> None:
    assert distribution_of("compute", given) == expected


@pytest.mark.parametrize("form", FORMS)
def test_every_form_that_messages_show_is_understood(form: str) -> None:
    assert distribution_of("compute", form).mean > 0


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("weibull(1s,2)", r"has no distribution 'weibull'; it may be one of constant\(20ms\)"),
        ("lognormal(50ms)", r"must be of the form lognormal\(50ms,0\.4\)"),
        ("lognormal(50,0.4)", r"must be a time of at least 0 with its unit, such as 200us, 50ms or 1\.5s, got '50'"),
        ("lognormal(50ms,x)", "has 'x' where a number without a unit is expected"),
        ("pareto(50ms,-1)", r"'pareto\(50ms,-1\)': shape of a distribution Pareto must be a number of at least 0"),
        ("constant(-5ms)", "must be a time of at least 0"),
        ("", "must be a time such as 20ms, or one of"),
        ("soon", "must be a time such as 20ms, or one of"),
        (-0.1, "must be a number of seconds of at least 0, a text or a distribution, got -0.1"),
        (True, "must be a number of seconds"),
    ],
)
def test_an_invalid_text_is_refused_with_the_option_and_the_allowed_forms(given, reason: str) -> None:
    with pytest.raises(SettingError, match=f"^compute {reason}"):
        distribution_of("compute", given)
