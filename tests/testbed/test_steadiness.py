import pytest

from coordinator.testbed.experiment import ASYNCHRONOUS, Experiment
from coordinator.testbed.results import TrialResult, steadiness
from tests.testbed.made_up import curve

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


def test_the_axis_with_the_largest_effect_is_first() -> None:
    results = [
        TrialResult([curve(trial, spikes)]) for trial, spikes in zip(EXPERIMENT.trials(), (0, 3, 0, 2), strict=True)
    ]
    assert [each.axis for each in steadiness(results)] == ["learning_rate", "optimizer"]


def test_only_trainings_with_all_values_count() -> None:
    rate, optimizer = steadiness(RESULTS[:3])
    assert optimizer.trainings == rate.trainings == 1
    assert optimizer.rises == pytest.approx((1.0, 0.0), abs=0.1)


def test_a_grid_with_one_value_on_each_axis_says_nothing() -> None:
    assert steadiness(RESULTS[:1]) == []
