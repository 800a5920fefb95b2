import math
from dataclasses import replace

import numpy as np
import pytest

from coordinator.testbed.experiment import ASYNCHRONOUS, SEQUENTIAL, SYNCHRONOUS, Experiment, Trial
from coordinator.testbed.results import LossCurve, TrialResult, findings, is_rising, spikes_of, steadiness
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


@pytest.mark.parametrize(
    ("values", "rises"),
    [
        ([], False),
        ([2, 2], False),
        ([1, 2, 2, 3], True),
        ([1, 3, 2, 4], True),
        ([1, 4, 3, 2], False),
        ([40, 90, float("inf"), float("inf")], True),
    ],
)
def test_numbers_rise_if_the_last_is_above_the_first_and_most_pairs_are_in_order(
    values: list[float], rises: bool
) -> None:
    assert is_rising(values) is rises


def test_curves_like_those_of_the_paper_agree_with_it() -> None:
    assert [(finding.claim, finding.verdict) for finding in findings(AS_FOUND, 1.0)] == [
        ("more delay, more instability", "agrees"),
        ("more delay, slower convergence", "agrees"),
        ("more workers, more instability", "agrees"),
        ("more workers, slower convergence", "agrees"),
        ("no delay, synchronous and asynchronous about the same", "agrees"),
    ]


def test_a_difference_for_some_numbers_of_workers_agrees_partly_and_is_named() -> None:
    steady = [*AS_FOUND[:-1], TrialResult([replace(AS_FOUND[-1].curves[0], losses=AS_FOUND[2].curves[0].losses)])]
    instability, *_ = findings(steady, 1.0)
    assert instability.verdict == "agrees in 1 of 2 cases"
    assert str(instability).splitlines() == [
        "more delay, more instability: agrees in 1 of 2 cases",
        "  2 workers: rise 0.00, 1.00 with 0, 1 s",
        "  3 workers: rise 0.00, 0.00 with 0, 1 s  <- not so",
    ]


def test_a_training_that_never_learns_is_the_slowest() -> None:
    slowness = findings([trained(2, 0.0), trained(2, 1.0, quickness=0.0)], 1.0)[1]
    assert str(slowness).splitlines()[1] == "  2 workers: 28, never batches with 0, 1 s"


@pytest.mark.parametrize(
    ("quickness", "spikes", "verdict"),
    [
        (0.05, 0, "agrees"),
        (0.03, 0, "does not agree"),  # slower by more than half
        (0.0, 0, "does not agree"),  # never
        (0.05, 1, "does not agree"),  # it ends elsewhere
    ],
)
def test_synchronous_and_asynchronous_agree_in_speed_and_final_loss(
    quickness: float, spikes: int, verdict: str
) -> None:
    agreement = findings([result(Trial(SYNCHRONOUS, 2)), trained(2, 0.0, spikes, quickness)], 1.0)[-1]
    assert agreement.verdict == verdict


def of(losses: list[float]) -> LossCurve:
    return LossCurve(
        trial=Trial(SEQUENTIAL, 1),
        seed=0,
        losses=np.array(losses),
        times=0.5 * np.arange(1, len(losses) + 1),
        mean_staleness=0.0,
        seconds=1.0,
        accuracy=0.25,
    )


def test_the_smoothed_loss_is_the_mean_of_the_last_ten() -> None:
    smoothed = of([float(number) for number in range(30)]).smoothed
    assert len(smoothed) == 30
    assert smoothed[0] == 0
    assert smoothed[1] == pytest.approx(0.5)
    assert smoothed[29] == pytest.approx(np.mean(range(20, 30)))


def test_the_final_loss_is_the_mean_of_the_last_tenth() -> None:
    assert of([5.0] * 18 + [1.0, 3.0]).final_loss == 2.0
    assert of([4.0]).final_loss == 4.0


def test_minibatches_and_time_are_counted_until_the_smoothed_loss_is_first_below() -> None:
    curve = of([2.0] * 10 + [0.0] * 20)
    assert (curve.batches_to(1.0), curve.seconds_to(1.0)) == (16, 8.0)
    assert curve.seconds_to(-1.0) is None


@pytest.mark.parametrize(
    ("losses", "spikes"),
    [
        ([], []),
        ([3, 2, 1, 0.5], []),
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


def test_only_trainings_with_all_values_count() -> None:
    rate, optimizer = steadiness(RESULTS[:3])
    assert optimizer.trainings == rate.trainings == 1
    assert optimizer.rises == pytest.approx((1.0, 0.0), abs=0.1)
