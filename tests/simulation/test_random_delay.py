import math

import numpy as np
import pytest

from coordinator.errors import SettingError
from coordinator.simulation.distribution import (
    Constant,
    Exponential,
    LogNormal,
    RandomDelay,
    parse_delay,
    parse_plain_seconds,
)
from coordinator.simulation.rules import Delayed
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate


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


@pytest.mark.parametrize(("text", "seconds"), [("0.5s", 0.5), ("0", 0.0), ("constant(20ms)", 0.02), ("inf", math.inf)])
def test_a_delay_that_is_always_the_same_is_a_number(text: str, seconds: float) -> None:
    assert parse_delay("delay", text) == seconds


def test_seconds_need_no_unit_where_that_is_allowed() -> None:
    delay = parse_delay("delays", "lognormal(0.1, 1.0)", parse_plain_seconds)
    assert isinstance(delay, RandomDelay)
    assert delay.each == (LogNormal(0.1, 1.0),)
    with pytest.raises(SettingError, match="delay must be a time of at least 0 with its unit"):
        parse_delay("delay", "lognormal(0.1, 1.0)")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("uniform(1s,2s)", "has no distribution 'uniform'"),
        ("lognormal(1s)", r"must be of the form lognormal\(50ms,0.4\)"),
        ("pareto(1s,1)", "must have a mean"),
        ("0.1s/", "must be a time such as 20ms"),
    ],
)
def test_another_form_is_refused(text: str, reason: str) -> None:
    with pytest.raises(SettingError, match=f"delay {reason}"):
        parse_delay("delay", text)


def test_the_delay_of_a_push_depends_on_worker_time_and_seed_alone() -> None:
    delay, other = (RandomDelay((Exponential(1.0),), "", seed) for seed in (1, 2))
    assert delay(0, 0.5) == delay(0, 0.5)
    assert len({delay(0, 0.5), delay(1, 0.5), delay(0, 0.6), other(0, 0.5)}) == 4
    drawn = [delay(worker, 0.1 * step) for worker in range(10) for step in range(300)]
    assert np.mean(drawn) == pytest.approx(1.0, rel=0.1)


def test_workers_beyond_the_last_distribution_have_that() -> None:
    delay = RandomDelay((Constant(0.0), Constant(3.0)), "")
    assert [delay(worker, 1.0) for worker in range(4)] == [0.0, 3.0, 3.0, 3.0]


def test_a_table_has_equally_likely_delays() -> None:
    table = RandomDelay((LogNormal(0.1, 1.0),), "").table(0, 64)
    assert (np.diff(table) > 0).all()
    assert np.log(table).mean() == pytest.approx(math.log(0.1), abs=0.02)
    assert np.log(table).std() == pytest.approx(1.0, rel=0.05)


def test_a_late_worker_makes_its_own_gradients_stale_alone() -> None:
    rule = Delayed(RandomDelay((Constant(0.0), Exponential(2.0)), ""))
    setting = Setting(workers=2, rule=rule, compute=0.1, latency=0.01, seconds=60.0)
    result = simulate(setting)
    quick, late = (result.staleness[result.push_workers == worker].mean() for worker in (0, 1))
    assert quick < 3
    # In two seconds the workers apply about 2 * 2 / 0.14 gradients.
    assert late == pytest.approx(2 * 2 / 0.14, rel=0.3)
    assert simulate(setting).staleness.tolist() == result.staleness.tolist()
