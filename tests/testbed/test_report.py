import csv
from pathlib import Path

import pytest

from coordinator.errors import SettingError
from coordinator.testbed.cell import SEQUENTIAL, SYNCHRONOUS, Cell
from coordinator.testbed.experiment import Experiment
from coordinator.testbed.report import Report
from tests.testbed.made_up import asynchronous, curve

EXPERIMENT = Experiment(workers=(2,), delays=(0.0, 1.0), batches=200)
CURVES = [
    curve(Cell(SEQUENTIAL, 1)),
    curve(Cell(SYNCHRONOUS, 2)),
    asynchronous(2, 0.0),
    asynchronous(2, 1.0, spikes=1, quickness=0.0),
]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_it_writes_all_losses_a_summary_and_pictures(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "results"
    names = Report(EXPERIMENT, folder).write(CURVES)
    assert names == ["losses.csv", "summary.csv", "summary.txt", "loss_2_workers.png"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert (folder / "loss_2_workers.png").stat().st_size > 10_000
    losses = rows(folder / "losses.csv")
    assert len(losses) == 4 * 200
    assert losses[200] == {
        "mode": "synchronous",
        "workers": "2",
        "delay_s": "0.0",
        "batch": "1",
        "loss": "3",
        "smoothed_loss": "3",
    }
    quick, never = rows(folder / "summary.csv")[2:]
    assert (quick["delay_s"], quick["spikes"], quick["batches_to_target"]) == ("0.0", "0", "28")
    assert (never["delay_s"], never["spikes"], never["batches_to_target"]) == ("1.0", "1", "")


def test_the_summary_says_what_was_tried_what_came_of_it_and_whether_the_paper_agrees(tmp_path: Path) -> None:
    text = Report(EXPERIMENT, tmp_path).text(CURVES)
    assert text.startswith(
        "digits, 200 minibatches of 100 in each training, steps of 0.2 s, learning rate 0.01, seed 0;"
    )
    assert "\nasynchronous, 2 workers, delay 1 s       1       4.000         never        1.0      1.0\n" in text
    assert "\nmore delay, more instability: agrees\n  2 workers: 0, 1 spikes with 0, 1 s\n" in text
    assert "Stopped" not in text


def test_a_summary_of_what_was_trained_until_ctrl_c_says_so(tmp_path: Path) -> None:
    report = Report(EXPERIMENT, tmp_path)
    assert "\nStopped after 1 of 4 trainings.\n" in report.text(CURVES[:1])
    assert report.write(CURVES[:1]) == ["losses.csv", "summary.csv", "summary.txt"]


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match="output cannot be made"):
        Report(EXPERIMENT, tmp_path / "file" / "results")
