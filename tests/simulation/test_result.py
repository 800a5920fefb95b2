import json
import re

import numpy as np
import pytest

from coordinator.simulation.rules import Synchronous
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate


@pytest.fixture(scope="module")
def result():
    return simulate(Setting(workers=6, rule=Synchronous(3), compute="exponential(50ms)", latency=0.001, pushes=3000))


def test_the_repr_has_the_setting_and_the_main_figures(result) -> None:
    assert re.fullmatch(
        r"<Result: 6 workers, 1 ps, synchronous\(grads_to_wait=3\): \S+ updates/s, \S+ gradients/s, "
        r"staleness mean \S+, p99 \d+, max \d+, idle 0\.0%, in \S+ s>",
        repr(result),
    )


def test_arrays_agree_with_one_another(result) -> None:
    assert len(result.push_times) == len(result.push_workers) == len(result.staleness) == 3000
    assert (np.diff(result.push_times) >= 0).all()
    assert result.staleness_counts.sum() == 3000
    assert result.clocks.sum() == 3000 - result.rejected
    assert result.updates == (3000 - result.rejected) // 3


def test_percentiles_are_observed_values(result) -> None:
    ordered = np.sort(result.staleness)
    assert result.p99_staleness == ordered[2969]
    assert result.staleness_percentile(50) == ordered[1499]
    assert result.max_staleness == ordered[-1]


def test_the_throughput_over_time_is_that_of_all_pushes(result) -> None:
    middles, rates = result.throughput(bins=20)
    assert len(middles) == len(rates) == 20
    assert (rates * result.seconds / 20).sum() == pytest.approx(3000)


def test_a_summary_can_be_written_as_json(result) -> None:
    summary = json.loads(json.dumps(result.summary()))
    assert summary["updates"] == result.updates
    assert summary["idle_share"] == 0


def test_a_result_without_pushes_has_figures() -> None:
    result = simulate(Setting(compute=10.0, seconds=1.0))
    assert (result.mean_staleness, result.p99_staleness, result.max_staleness) == (0, 0, 0)
    assert result.compute_share == pytest.approx(1.0)
    assert "0 updates/s" in repr(result)
