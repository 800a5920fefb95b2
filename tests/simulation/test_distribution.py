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
    Slowed,
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
def test_what_is_drawn_has_the_mean_that_is_stated_and_is_never_negative(distribution: Distribution) -> None:
    times = distribution.sample(np.random.default_rng(0), 200_000)
    assert times.shape == (200_000,)
    assert times.dtype == np.float64
    assert times.min() >= 0
    assert times.mean() == pytest.approx(distribution.mean, rel=0.02)


@pytest.mark.parametrize("distribution", ALL, ids=str)
def test_one_at_a_time_is_the_same_as_in_blocks(distribution: Distribution) -> None:
    draw = distribution.drawn(np.random.default_rng(3))
    generator = np.random.default_rng(3)
    blocks = np.concatenate([distribution.sample(generator, 4096) for _ in range(2)])
    assert [draw() for _ in range(5000)] == blocks[:5000].tolist()


def test_the_parameters_of_a_lognormal_are_its_median_and_the_deviation_of_its_logarithm() -> None:
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
def test_what_no_time_can_be_is_refused(make) -> None:
    with pytest.raises(SettingError, match=r"of a distribution \w+ must be"):
        make()
