import csv
import math
import re
from pathlib import Path

import pytest

from coordinator.testbed.experiment import ASYNCHRONOUS, SEQUENTIAL, SYNCHRONOUS, Experiment, Trial
from coordinator.testbed.report import Report
from coordinator.testbed.results import TrialResult, findings, spikes_of, steadiness
from tests.testbed.made_up import asynchronous, curve, result


def trained(workers: int, delay: float, spikes: int = 0, quickness: float = 0.05) -> TrialResult:
    return TrialResult([asynchronous(workers, delay, spikes, quickness)])


# As in the paper.
AS_FOUND = [
    result(Trial(SYNCHRONOUS, 2)),
    result(Trial(SYNCHRONOUS, 3)),
    trained(2, 0.0),
    trained(2, 1.0, spikes=1, quickness=0.03),
    trained(3, 0.0),
    trained(3, 1.0, spikes=2, quickness=0.02),
]


def test_curves_like_those_of_the_paper_agree_with_it() -> None:
    assert [(finding.claim, finding.verdict) for finding in findings(AS_FOUND, 1.0)] == [
        ("more delay, more instability", "agrees"),
        ("more delay, slower convergence", "agrees"),
        ("more workers, more instability", "agrees"),
        ("more workers, slower convergence", "agrees"),
        ("no delay, synchronous and asynchronous about the same", "agrees"),
    ]


@pytest.mark.parametrize(
    ("losses", "spikes"),
    [
        ([1, 1.5, 1], [0.5]),
        ([1, 1.05, 1.1, 1.15, 1.2], [0.2]),  # in small steps, and it stays there there
        ([1, 1.06, 0.9, 0.96], []),  # a rise counts from the least since the last spike
        ([1, 2, 1.5, 2], [1, 0.5]),  # the second begins before the first has come back to where it began
        ([1, 2, 1.95, 2.05, 1], [1.05]),  # small changes at the top are not separate spikes
        ([3, 1, 1.5, 1, 0.5, 0.9, 0.3], [0.5, 0.4]),
        ([1, math.nan, math.nan], [math.inf]),
        ([math.nan, math.nan], []),  # high from the beginning: it never rose
    ],
)
def test_a_spike_is_a_rise_and_ends_with_a_fall(losses: list[float], spikes: list[float]) -> None:
    assert spikes_of(losses) == pytest.approx(spikes)


EXPERIMENT = Experiment(
    modes=[ASYNCHRONOUS], workers=(2,), delays=(1.0,), optimizer=("sgd", "adam"), learning_rate=(0.01, 0.02)
)
# Of sgd with both rates, then of adam.
SPIKES = (1, 3, 0, 1)
RESULTS = [TrialResult([curve(trial, count)]) for trial, count in zip(EXPERIMENT.trials(), SPIKES, strict=True)]


def test_values_of_an_axis_are_compared_all_else_being_equal() -> None:
    optimizer, rate = steadiness(RESULTS)
    assert (optimizer.axis, optimizer.values, optimizer.trainings) == ("optimizer", ("sgd", "adam"), 2)
    assert optimizer.rises == pytest.approx((2.0, 0.5), abs=0.1)
    assert (rate.axis, rate.values) == ("learning_rate", (0.01, 0.02))
    assert rate.rises == pytest.approx((0.5, 2.0), abs=0.1)
    assert str(optimizer).startswith("optimizer: steadiest with adam: rise 1.99, 0.50 with sgd, adam; ")
    assert str(rate).endswith("; means of 2 trainings each")


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
