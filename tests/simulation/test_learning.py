import dataclasses

import numpy as np
import pytest

from coordinator.simulation.learning import Learning, LogisticRegression, SmallNetwork
from coordinator.simulation.rules import (
    Asynchronous,
    BoundedDelay,
    Delayed,
    ModelAverage,
    StaleSynchronous,
    Synchronous,
)
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate


@dataclasses.dataclass(frozen=True)
class Bowl:
    """A custom problem: a parabola, whose gradient has no noise."""

    initial: np.ndarray = dataclasses.field(default_factory=lambda: np.array([1.0, -2.0]))

    def gradient(self, parameters, generator):
        return parameters

    def loss(self, parameters):
        return float(parameters @ parameters) / 2


def losses(rule, *, workers: int = 1, pushes: int = 20, compute=0.1, problem=None, rate: float = 0.1):
    learning = Learning(problem or Bowl(), learning_rate=rate, evaluate_every=1)
    return simulate(Setting(workers=workers, rule=rule, compute=compute, pushes=pushes, learning=learning))


def test_one_worker_does_plain_gradient_descent_under_every_rule_of_single_gradients() -> None:
    expected = [2.5 * 0.9 ** (2 * step) for step in range(21)]
    for rule in (Asynchronous(), Asynchronous(True), Synchronous(1), BoundedDelay(0), StaleSynchronous(4)):
        result = losses(rule)
        assert result.losses == pytest.approx(expected), rule
        assert result.loss_pushes.tolist() == list(range(21))
        assert result.loss_times[1:] == pytest.approx(result.push_times)


def test_model_averaging_alone_is_gradient_descent_seen_one_step_late() -> None:
    expected = [2.5, *(2.5 * 0.9 ** (2 * step) for step in range(20))]
    assert losses(ModelAverage()).losses == pytest.approx(expected)


def test_an_old_gradient_is_that_of_the_model_that_was_pulled() -> None:
    result = losses(Asynchronous(), workers=2, compute=[1.0, 1.5], pushes=3, rate=0.5)
    # At 1 s: x = 1 - 0.5. At 1.5 s worker 1's gradient of the first x: 0.5 - 0.5. At 2 s worker 0's of 0.5: -0.25.
    assert result.losses == pytest.approx([2.5, 2.5 * 0.25, 0.0, 2.5 * 0.0625])


@pytest.mark.parametrize("problem", [LogisticRegression(), SmallNetwork()], ids=lambda problem: type(problem).__name__)
def test_a_gradient_is_that_of_the_loss(problem) -> None:
    """On average over minibatches, compared with differences of the loss."""
    generator = np.random.default_rng(0)
    parameters = problem.initial + 0.1 * generator.normal(size=problem.initial.shape)
    mean = np.mean([problem.gradient(parameters, generator) for _ in range(4000)], axis=0)
    steps = 1e-5 * np.eye(len(parameters))
    slopes = [(problem.loss(parameters + step) - problem.loss(parameters - step)) / 2e-5 for step in steps]
    assert np.abs(mean - slopes).max() < 0.03 * max(1.0, np.abs(slopes).max())


@pytest.mark.parametrize(
    "rule",
    [
        Asynchronous(),
        *(
            pytest.param(rule, marks=pytest.mark.long)
            for rule in (StaleSynchronous(4, 8), ModelAverage(), Synchronous(3), BoundedDelay(2), Delayed(0.1))
        ),
    ],
    ids=str,
)
def test_a_network_learns_under_every_rule_and_the_same_way_again(rule) -> None:
    first, again = (
        losses(rule, workers=4, compute="exponential(50ms)", pushes=1500, problem=SmallNetwork(), rate=0.5)
        for _ in range(2)
    )
    assert first.losses[-1] < 0.6 * first.losses[0]
    assert first.losses.tolist() == again.losses.tolist()
