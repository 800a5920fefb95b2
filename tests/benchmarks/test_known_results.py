"""Tests that the simulator reproduces published results."""

import numpy as np
import pytest

from benchmarks.known_results import BackupWorkers, BoundedDelays, Convergence, Overheads, Softsync, Stragglers


def test_synchronous_training_waits_for_the_slowest_and_averaging_does_not() -> None:
    measured = Stragglers.measure()
    assert measured.synchronous == pytest.approx(1 / Stragglers.FACTORS, rel=0.02)
    assert measured.averaged == pytest.approx(Stragglers.averaged_formula(Stragglers.FACTORS), rel=0.02)


@pytest.mark.release
def test_published_slowness_and_staleness_are_reproduced() -> None:
    overheads, convergence = Overheads.measure(), Convergence.measure()
    assert overheads.largest_error < 0.05
    assert overheads.synchronous[-1] > 30 * overheads.asynchronous[-1]
    assert convergence.synchronous == pytest.approx(convergence.synchronous_formula, rel=0.03)
    assert convergence.asynchronous == pytest.approx(convergence.asynchronous_formula, rel=0.15)
    # The staleness of n-softsync is about n; with a large n it learns with modulation alone.
    softsync = Softsync.measure()
    assert softsync.means == pytest.approx(Softsync.SPLITS, rel=0.1)
    assert softsync.over_twice < 1e-4
    few, many, modulated = (result.losses for result in softsync.learned.values())
    assert few[-1] < 0.25 * few[0]
    assert modulated[-1] < 0.25 * modulated[0]
    assert np.min(many[len(many) // 2 :]) > many[0]


@pytest.mark.release
def test_a_few_backup_workers_and_a_delay_in_between_are_best() -> None:
    backups = BackupWorkers.measure()
    assert 3 <= backups.best <= 10
    assert backups.gradients_per_second.max() > 1.5 * backups.gradients_per_second[0]
    assert backups.gradients_per_second.max() > 1.2 * backups.gradients_per_second[-1]
    assert (np.diff(backups.update_seconds) < 0).all()
    delays = BoundedDelays.measure()
    for shares in (delays.idle_shares, delays.our_idle_shares):
        assert 0.4 < shares[0] < 0.65
        assert shares[-1] < 0.03
        assert (np.diff(shares) <= 0).all()
    assert delays.best in {4, 8}
    assert delays.seconds.min() < 0.6 * delays.seconds[0]
    assert delays.seconds.min() < 0.8 * delays.seconds[-1]
