"""What is compared is of all real runs together."""

import numpy as np
import pytest

from coordinator.simulation.rules.bounded_delay import BoundedDelay
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate
from coordinator.testbed.confirmation.figures import Counted, Figures


def test_runs_count_as_if_they_were_one() -> None:
    short = Counted(seconds=10.0, updates=30, histogram=np.array([10, 20, 0]), waited=3.0)
    long = Counted(seconds=30.0, updates=170, histogram=np.array([0, 100, 70]), waited=5.0)
    figures = Figures.of_runs([short, long], workers=2)
    assert figures.mean_staleness == pytest.approx((120 + 140) / 200)
    assert figures.p99_staleness == 2
    assert figures.updates_per_second == pytest.approx(5.0)
    assert figures.idle_share == pytest.approx(8.0 / 80.0)


def test_those_of_a_simulation_are_its_own() -> None:
    result = simulate(Setting(workers=2, rule=BoundedDelay(1), compute=[0.1, 0.3], pushes=100))
    figures = Figures.of_simulation(result)
    assert (figures.mean_staleness, figures.p99_staleness) == (result.mean_staleness, result.p99_staleness)
    assert (figures.updates_per_second, figures.idle_share) == (result.updates_per_second, result.idle_share)
