import csv
from pathlib import Path

import pytest

from coordinator.errors import SettingError
from coordinator.testbed.experiment import SEQUENTIAL, SYNCHRONOUS, Experiment, Trial
from coordinator.testbed.report import Report, draw_losses, shown_with
from tests.testbed.made_up import asynchronous, curve

EXPERIMENT = Experiment(workers=(2,), delays=(0.0, 1.0), batches=200)
CURVES = [
    curve(Trial(SEQUENTIAL, 1)),
    curve(Trial(SYNCHRONOUS, 2)),
    asynchronous(2, 0.0),
    asynchronous(2, 1.0, spikes=1, quickness=0.0),
]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_report_has_all_losses_a_summary_and_plots(tmp_path: Path) -> None:
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


def test_the_summary_has_settings_results_and_whether_the_paper_agrees(tmp_path: Path) -> None:
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


def test_a_folder_that_cannot_be_created_is_an_error_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match="output cannot be created"):
        Report(EXPERIMENT, tmp_path / "file" / "results")


SEQUENCE, TOGETHER = curve(Trial(SEQUENTIAL, 1)), curve(Trial(SYNCHRONOUS, 2))
LATE = [asynchronous(2, delay) for delay in (0.0, 0.5, 1.0, 1.5, 2.0)]


def test_a_plot_shows_one_number_of_workers_and_the_sequential_training() -> None:
    curves = [SEQUENCE, TOGETHER, *LATE, asynchronous(3, 0.0)]
    assert shown_with(curves, 2) == [SEQUENCE, TOGETHER, *LATE]
    assert shown_with(curves, 3) == [SEQUENCE, curves[-1]]


def test_there_is_no_plot_of_the_sequential_training_alone() -> None:
    assert shown_with([SEQUENCE, TOGETHER], 1) == []


def test_every_line_has_a_label_and_a_unique_style_and_axes_have_units() -> None:
    figure = draw_losses([SEQUENCE, TOGETHER, *LATE], 2, Experiment())
    (axes,) = figure.axes
    assert axes.get_title() == "2 workers, digits, steps of 0.2 s"
    assert axes.get_xlabel() == "processed minibatches (of 100 images)"
    assert axes.get_ylabel() == "training loss (cross entropy in nats, mean of 10 minibatches)"
    *lines, target = axes.lines
    assert [line.get_label() for line in lines] == [
        "sequential",
        "synchronous",
        *(f"asynchronous, delay {delay:g} s" for delay in (0, 0.5, 1, 1.5, 2)),
    ]
    assert target.get_label() == "loss of 1"
    styles = {(line.get_color(), line.get_marker()) for line in lines}
    assert len({colour for colour, _ in styles}) == len(lines)
    assert len({line.get_marker() for line in lines[2:]}) == len(LATE)
    for line, shown in zip(lines, [SEQUENCE, TOGETHER, *LATE], strict=True):
        assert line.get_ydata().tolist() == shown.smoothed.tolist()


def test_a_diverged_training_does_not_flatten_the_other_curves() -> None:
    lost = asynchronous(2, 2.0)
    lost.losses[100:] = 1e6
    (axes,) = draw_losses([SEQUENCE, lost], 2, Experiment()).axes
    assert axes.get_ylim()[1] < 8
    lost.losses[100:] = float("nan")
    (axes,) = draw_losses([SEQUENCE, lost], 2, Experiment()).axes
    assert 0 < axes.get_ylim()[1] < 8
