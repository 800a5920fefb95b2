import numpy as np
import pytest

from coordinator.simulation.known_results import backup_workers
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate
from tests.simulation.known_results.measured_once import measured_once


def test_a_few_backup_workers_are_better_than_none_and_than_many() -> None:
    measured = measured_once(backup_workers)
    assert 3 <= measured.best <= 10
    assert measured.gradients_per_second.max() > 1.5 * measured.gradients_per_second[0]
    assert measured.gradients_per_second.max() > 1.2 * measured.gradients_per_second[-1]
    assert (np.diff(measured.update_seconds) < 0).all()


def test_a_worker_gives_each_update_one_gradient_at_most() -> None:
    result = simulate(Setting(workers=3, rule=backup_workers.WithBackups(2), compute=[1.0, 1.5, 2.2], seconds=9.1))
    # The second worker completes an update every 1.5 s; the third, which takes longer, is always too late.
    assert result.push_times[result.push_workers == 0] == pytest.approx([1.0, 2.5, 4.0, 5.5, 7.0, 8.5])
    assert result.rejected == (result.push_workers == 2).sum() == 4
    assert result.waited[0] == pytest.approx(6 * 0.5)
