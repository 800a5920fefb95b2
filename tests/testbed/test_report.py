import csv
import re
from pathlib import Path

from coordinator.testbed.experiment import ASYNCHRONOUS, SEQUENTIAL, SYNCHRONOUS, Experiment, Trial
from coordinator.testbed.report import Report, draw_losses
from coordinator.testbed.results import TrialResult
from tests.testbed.made_up import asynchronous, curve, result

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
    assert names == ["losses.csv", "summary.csv", "summary.txt", "loss_2_workers.png", "loss_2_workers_over_time.png"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert (folder / "loss_2_workers.png").stat().st_size > 10_000
    losses = rows(folder / "losses.csv")
    assert len(losses) == 4 * 200
    assert losses[200] == {
        "mode": "synchronous",
        "workers": "2",
        "delay_s": "0.0",
        "optimizer": "sgd",
        "learning_rate": "0.01",
        "weight_decay": "0.0",
        "batch_size": "100",
        "seed": "0",
        "batch": "1",
        "time_s": "0.1",
        "loss": "3",
        "smoothed_loss": "3",
    }
    quick, never = rows(folder / "summary.csv")[2:]
    columns = ("delay_s", "spikes", "rise", "accuracy", "batches_to_target", "seconds_to_target")
    assert [quick[column] for column in columns] == ["0.0", "0", "0", "0.5", "28", "2.8"]
    assert [never[column] for column in columns] == ["1.0", "1", "1", "0.5", "", ""]


def test_the_summary_has_settings_results_and_whether_the_paper_agrees(tmp_path: Path) -> None:
    text = Report(EXPERIMENT, tmp_path).text(CURVES)
    assert text.startswith(
        "digits, 200 minibatches of 100 in each training, steps of 0.2 s, learning rate 0.01, seed 0;"
    )
    (row,) = re.findall(r"^asynchronous, 2 workers, delay 1 s +(.*)$", text, re.MULTILINE)
    assert row.split() == ["1", "1.00", "4.000", "50.0%", "never", "never", "1.0", "1.0"]
    assert "\nmore delay, more instability: agrees\n  2 workers: rise 0.00, 1.00 with 0, 1 s\n" in text
    assert "Stopped" not in text


def test_a_summary_of_what_was_trained_until_ctrl_c_says_so(tmp_path: Path) -> None:
    report = Report(EXPERIMENT, tmp_path)
    assert "\nStopped after 1 of 4 trainings.\n" in report.text(CURVES[:1])
    assert report.write(CURVES[:1]) == ["losses.csv", "summary.csv", "summary.txt"]


def test_several_runs_are_shown_by_their_mean_and_spread(tmp_path: Path) -> None:
    trial = Trial(ASYNCHRONOUS, 2, 1.0)
    runs = [curve(trial, quickness=quickness, seed=seed) for seed, quickness in enumerate((0.05, 0.04, 0.0))]
    experiment = Experiment(modes=[ASYNCHRONOUS], workers=(2,), delays=(1.0,), repeats=3)
    report = Report(experiment, tmp_path)
    text = report.text(runs)
    assert ", seeds 0 to 2;" in text
    (row,) = re.findall(r"^asynchronous, 2 workers, delay 1 s +(.*)$", text, re.MULTILINE)
    cells = re.split(r"  +", row)
    assert cells[2].startswith("1.0")
    assert "±1.7" in cells[2]
    assert cells[4:6] == ["34 (28 to never)", "3.4 (2.8 to never)"]
    assert "means of 3 runs" in text
    assert "Stopped after 2 of 3 trainings." in report.text(runs[:2])
    report.write(runs)
    assert [row["seed"] for row in rows(tmp_path / "summary.csv")] == ["0", "1", "2"]


def test_each_point_of_the_other_axes_has_its_picture_and_its_findings(tmp_path: Path) -> None:
    experiment = Experiment(modes=[ASYNCHRONOUS], workers=(2,), delays=(0.0, 1.0), learning_rate=(0.01, 0.02))
    spikes = (0, 1, 0, 2)
    curves = [curve(trial, count) for trial, count in zip(experiment.trials(), spikes, strict=True)]
    report = Report(experiment, tmp_path)
    assert report.write(curves)[3::2] == ["loss_2_workers_rate_0.01.png", "loss_2_workers_rate_0.02.png"]
    text = report.text(curves)
    assert "\n  rate 0.01; 2 workers: rise 0.00, 1.00 with 0, 1 s\n" in text
    assert "\nWhat steadies the loss:\nlearning rate: steadiest with 0.01: rise 0.50, 1.00 with 0.01, 0.02; " in text
    (axes,) = draw_losses([TrialResult(curves[2:3])], 2, experiment).axes
    assert axes.get_title().endswith(", rate 0.02")


SEQUENCE, TOGETHER = result(Trial(SEQUENTIAL, 1)), result(Trial(SYNCHRONOUS, 2))
LATE = [result(Trial(ASYNCHRONOUS, 2, delay)) for delay in (0.0, 0.5, 1.0, 1.5, 2.0)]


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


