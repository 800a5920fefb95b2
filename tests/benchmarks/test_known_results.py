"""Tests that the simulator reproduces published results; each is simulated once for all tests."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.known_results import (
    RESULTS,
    BackupWorkers,
    BoundedDelays,
    Convergence,
    Overheads,
    Softsync,
    Stragglers,
    main,
)


@functools.cache
def measured_once(known: type) -> Any:
    return known.measure()


def test_synchronous_training_waits_for_the_slowest_and_averaging_does_not() -> None:
    measured = measured_once(Stragglers)
    assert measured.synchronous == pytest.approx(1 / Stragglers.FACTORS, rel=0.02)
    assert measured.averaged == pytest.approx(Stragglers.averaged_formula(Stragglers.FACTORS), rel=0.02)


@pytest.mark.long
def test_lost_time_equals_that_of_the_published_table() -> None:
    measured = measured_once(Overheads)
    assert measured.largest_error < 0.05
    assert measured.synchronous[-1] > 30 * measured.asynchronous[-1]


@pytest.mark.long
def test_convergence_slows_down_as_the_published_table_says() -> None:
    measured = measured_once(Convergence)
    assert measured.synchronous == pytest.approx(measured.synchronous_formula, rel=0.03)
    assert measured.asynchronous == pytest.approx(measured.asynchronous_formula, rel=0.15)


@pytest.mark.long
def test_a_few_backup_workers_are_better_than_none_and_than_many() -> None:
    measured = measured_once(BackupWorkers)
    assert 3 <= measured.best <= 10
    assert measured.gradients_per_second.max() > 1.5 * measured.gradients_per_second[0]
    assert measured.gradients_per_second.max() > 1.2 * measured.gradients_per_second[-1]
    assert (np.diff(measured.update_seconds) < 0).all()


@pytest.mark.long
def test_the_staleness_of_n_softsync_is_about_n_and_almost_never_above_2n() -> None:
    measured = measured_once(Softsync)
    assert measured.means == pytest.approx(Softsync.SPLITS, rel=0.1)
    assert measured.over_twice < 1e-4


@pytest.mark.long
def test_n_softsync_with_a_large_n_learns_with_modulation_alone() -> None:
    few, many, modulated = (result.losses for result in measured_once(Softsync).learned.values())
    assert few[-1] < 0.25 * few[0]
    assert modulated[-1] < 0.25 * modulated[0]
    assert np.min(many[len(many) // 2 :]) > many[0]


@pytest.mark.long
def test_idle_time_falls_with_the_delay_from_about_half_to_a_few_percent() -> None:
    measured = measured_once(BoundedDelays)
    for shares in (measured.idle_shares, measured.our_idle_shares):
        assert 0.4 < shares[0] < 0.65
        assert shares[-1] < 0.03
        assert (np.diff(shares) <= 0).all()


@pytest.mark.long
def test_a_loss_is_reached_first_at_a_delay_in_between() -> None:
    measured = measured_once(BoundedDelays)
    assert measured.best in {4, 8}
    assert measured.seconds.min() < 0.6 * measured.seconds[0]
    assert measured.seconds.min() < 0.8 * measured.seconds[-1]


@pytest.mark.long
def test_each_result_is_printed_in_a_line_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["known_results", str(tmp_path / "pictures")])
    measured = {known: measured_once(known) for known in RESULTS.values()}
    for known, found in measured.items():
        monkeypatch.setattr(known, "measure", lambda found=found: found)
    main()
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == list(RESULTS)
    assert sorted(path.stem for path in (tmp_path / "pictures").glob("*.png")) == sorted(RESULTS)
