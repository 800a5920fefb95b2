import dataclasses

import numpy as np
import pytest

from coordinator.simulation.rules import BoundedDelay
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate
from coordinator.testbed.confirmation import Comparison, Figures, table, times_table, verdict
from coordinator.testbed.step_times import Run, StepTimes

TIMES = StepTimes(computed=((0.1, 0.12), (0.1, 0.1), (0.25,)), dispatch=(0.01, 0.03), pull=0.004, push=0.006)


def figures(staleness: float = 2.0, rate: float = 20.0, idle: float = 0.0) -> Figures:
    return Figures(staleness, 5, rate, idle)


def comparison(real: Figures, simulated: Figures, repeated: list[Figures] | None = None) -> Comparison:
    return Comparison("SSP, 3", real, simulated, repeated or [real], TIMES)


@pytest.mark.parametrize(
    ("simulated", "agrees"),
    [
        (figures(), True),
        (figures(staleness=2.19), True),
        (figures(staleness=2.21), False),
        (figures(staleness=1.79), False),
        (figures(rate=21.9), True),
        (figures(rate=22.1), False),
        (figures(rate=17.9), False),
        # Idle time is shown, but not compared.
        (figures(idle=0.5), True),
    ],
)
def test_both_staleness_and_speed_must_be_within_a_tenth(simulated: Figures, agrees: bool) -> None:
    assert comparison(figures(), simulated).agrees is agrees


def test_zero_staleness_agrees_only_with_zero_staleness() -> None:
    assert comparison(figures(staleness=0.0), figures(staleness=0.0)).agrees
    assert not comparison(figures(staleness=0.0), figures(staleness=0.1)).agrees


def test_the_tables_have_a_row_for_each() -> None:
    found = [comparison(figures(idle=0.25), figures(staleness=2.1, rate=19.0, idle=0.3))]
    assert table(found).splitlines()[2].split() == [
        *("SSP,", "3", "2.00", "2.10", "+5.0%", "5", "5", "20.00", "19.00", "-5.0%", "25.0%", "30.0%")
    ]
    trials = times_table(found).splitlines()[2]
    assert trials.split() == [
        *("SSP,", "3", "105.0", "ms", "250.0", "ms", "4.0", "ms", "6.0", "ms", "20.0", "ms", "22%")
    ]


def test_differences_within_noise_are_distinguished_from_larger_ones() -> None:
    apart = [figures(staleness=1.5, rate=20.0), figures(staleness=2.5, rate=20.1)]
    (agreed, line) = verdict([comparison(figures(), figures(staleness=2.4, rate=30.0), apart)]).splitlines()
    assert agreed == "0 of 1 settings agree within 10% in mean staleness and in updates/s."
    assert line == (
        "SSP, 3: mean staleness +20%; the real runs had 1.50 to 2.50, the simulated value is in that range: within "
        "noise; updates/s +50%; the real runs had 20.00 to 20.10, the simulated value is outside that range."
    )


def test_the_report_explains_that_real_workers_poll_while_they_wait() -> None:
    found = [comparison(figures(idle=0.3), figures(rate=30.0, idle=0.2)), comparison(figures(), figures())]
    (agreed, line) = verdict(found).splitlines()
    assert agreed.startswith("1 of 2 settings agree")
    assert line.endswith("; a real worker that waits may begin while the gradient that it waited for is being applied.")


def test_several_runs_are_combined_into_one() -> None:
    short = Run(seconds=10.0, updates=30, histogram=np.array([10, 20, 0]), waited=3.0, recorded=[])
    long = Run(seconds=30.0, updates=170, histogram=np.array([0, 100, 70]), waited=5.0, recorded=[])
    figures = Figures.of_runs([short, long], workers=2)
    assert figures.mean_staleness == pytest.approx((120 + 140) / 200)
    assert figures.p99_staleness == 2
    assert figures.updates_per_second == pytest.approx(5.0)
    assert figures.idle_share == pytest.approx(8.0 / 80.0)


def test_a_simulation_result_has_all_compared_figures() -> None:
    result = simulate(Setting(workers=2, rule=BoundedDelay(1), compute=[0.1, 0.3], pushes=100))
    assert all(getattr(result, field.name) >= 0 for field in dataclasses.fields(Figures))
