from dataclasses import replace

import pytest

from coordinator.testbed.experiment import SYNCHRONOUS, Trial
from coordinator.testbed.results import TrialResult, findings, is_rising
from tests.testbed.made_up import asynchronous as made_up_curve
from tests.testbed.made_up import result


def asynchronous(workers: int, delay: float, spikes: int = 0, quickness: float = 0.05) -> TrialResult:
    return TrialResult([made_up_curve(workers, delay, spikes, quickness)])


# As in the paper.
AS_FOUND = [
    result(Trial(SYNCHRONOUS, 2)),
    result(Trial(SYNCHRONOUS, 3)),
    asynchronous(2, 0.0),
    asynchronous(2, 1.0, spikes=1, quickness=0.03),
    asynchronous(3, 0.0),
    asynchronous(3, 1.0, spikes=2, quickness=0.02),
]


@pytest.mark.parametrize(
    ("values", "rises"),
    [
        ([], False),
        ([1], False),
        ([1, 2], True),
        ([2, 2], False),
        ([1, 2, 2, 3], True),
        ([1, 3, 2, 4], True),
        ([1, 4, 3, 2], False),
        ([3, 2, 1], False),
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


def test_a_difference_for_all_numbers_of_workers_does_not_agree() -> None:
    turned = [asynchronous(2, 0.0, spikes=2, quickness=0.02), asynchronous(2, 1.0)]
    assert [finding.verdict for finding in findings(turned, 1.0)][:2] == ["does not agree"] * 2


def test_a_training_that_never_learns_is_the_slowest() -> None:
    slowness = findings([asynchronous(2, 0.0), asynchronous(2, 1.0, quickness=0.0)], 1.0)[1]
    assert str(slowness).splitlines()[1] == "  2 workers: 28, never batches with 0, 1 s"


def test_findings_without_data_in_the_grid_are_undecided() -> None:
    assert {finding.verdict for finding in findings(AS_FOUND[:1], 1.0)} == {"cannot be told from this grid"}


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
    agreement = findings([result(Trial(SYNCHRONOUS, 2)), asynchronous(2, 0.0, spikes, quickness)], 1.0)[-1]
    assert agreement.verdict == verdict
