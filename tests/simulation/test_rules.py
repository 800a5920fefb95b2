"""Tests of each rule, step by step where it can be calculated by hand, and of what is learned under it."""

import dataclasses
import functools
import inspect
import math

import numpy as np
import pytest

from coordinator import updates
from coordinator.errors import SettingError
from coordinator.simulation.learning import Learning, LogisticRegression, SmallNetwork
from coordinator.simulation.request import rule_of
from coordinator.simulation.rules import (
    RULES,
    Asynchronous,
    BoundedDelay,
    Delayed,
    ModelAverage,
    StaleSynchronous,
    Synchronous,
)
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate
from coordinator.simulation.simulated_tasks import Death
from coordinator.updates import decisions

# The functions of `coordinator.updates.decisions` that a simulation of each rule calls.
DECIDED = {
    Asynchronous(True): {"staleness", "learning_rate_scale"},
    Synchronous(2): {"staleness", "is_accepted", "is_complete"},
    StaleSynchronous(2, 3): {"staleness", "is_pull_due", "may_lead", "rejoined_clock"},
    StaleSynchronous(2, 3, grads_to_wait=2): {"staleness", "is_pull_due", "may_lead", "rejoined_clock", "is_complete"},
    BoundedDelay(2, grads_to_wait=2): {"staleness", "may_start", "is_complete"},
    ModelAverage(period=0.1, warmup_steps=3): {"staleness", "is_average_due"},
    Delayed(0.1): {"staleness", "is_delay_over"},
}


@pytest.mark.parametrize("rule", DECIDED, ids=str)
def test_a_simulated_rule_calls_the_decision_functions_of_the_real_rule(rule, monkeypatch: pytest.MonkeyPatch) -> None:
    called = set()

    def recording(name: str, decision):
        @functools.wraps(decision)
        def decide(*arguments):
            called.add(name)
            return decision(*arguments)

        return decide

    for name in [name for name, value in vars(decisions).items() if callable(value) and name != "Any"]:
        monkeypatch.setattr(decisions, name, recording(name, getattr(decisions, name)))
    simulate(Setting(workers=3, rule=rule, compute="exponential(50ms)", pushes=100))
    assert called == DECIDED[rule]


@pytest.mark.parametrize("name", RULES)
def test_a_rule_has_the_name_and_the_settings_that_it_has_on_a_cluster(name: str) -> None:
    rule = rule_of(name, {"grads_to_wait": 2, "max_delay": 1, "delay": 0.5})
    assert rule.name == name
    real = inspect.signature(getattr(updates, type(rule).__name__)).parameters
    assert {field.name for field in dataclasses.fields(rule)} <= set(real)


def test_an_invalid_setting_of_a_rule_is_refused() -> None:
    for kind, settings in (
        (Asynchronous, {"lr_staleness_modulation": "yes"}),
        (Synchronous, {"grads_to_wait": 0}),
        (BoundedDelay, {"max_delay": 0.5}),
        (BoundedDelay, {"max_delay": 1, "grads_to_wait": 0}),
        (StaleSynchronous, {"max_lead": 0}),
        (ModelAverage, {"warmup_steps": -1}),
        (Delayed, {"delay": math.nan}),
    ):
        with pytest.raises(SettingError, match=" must be "):
            kind(**settings)


def test_the_synchronous_rule_takes_the_first_gradients_and_rejects_old_ones() -> None:
    setting = Setting(workers=2, rule=Synchronous(2), compute=[1.0, 3.3], seconds=7.25)
    result = simulate(setting)
    # Worker 0 makes each update alone, with two gradients; worker 1's gradients are late by one version or more.
    assert result.push_workers.tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 0]
    assert result.staleness.tolist() == [0, 0, 0, 1, 0, 0, 0, 2, 0]
    assert result.rejected == 2
    assert result.idle_share == 0


def test_bounded_delay_keeps_every_gradient_within_its_bound_and_rejects_none() -> None:
    for max_delay in (0, 1, 5):
        result = simulate(
            Setting(workers=6, rule=BoundedDelay(max_delay), compute="pareto(20ms,1.2)", stragglers=0.2, pushes=5000)
        )
        assert result.max_staleness <= max_delay
        assert result.rejected == 0


@pytest.mark.parametrize("max_lead", [1, 4])
def test_no_worker_leads_the_slowest_by_more_than_the_lead(max_lead: int) -> None:
    result = simulate(
        Setting(workers=4, rule=StaleSynchronous(max_lead=max_lead), compute=[0.1, 0.1, 0.2, 1.0], pushes=2000)
    )
    clocks = np.zeros(4, int)
    for worker in result.push_workers:
        clocks[worker] += 1
        assert clocks.max() - clocks.min() <= max_lead
    assert result.idle_shares[3] == 0
    assert result.idle_shares[0] == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize("others", [[], [Death(0, 10.0, back_after=2.0), Death(1, 10.0, back_after=2.0)]])
def test_a_worker_that_returns_continues_at_the_clock_of_others(others: list[Death]) -> None:
    """If no other works when it returns, those that return later do not wait for what it has missed."""
    deaths = [Death(2, 1.05, back_after=10.0), *others]
    rule = StaleSynchronous(max_lead=2)
    result = simulate(Setting(workers=3, rule=rule, compute=0.1, deaths=deaths, detection=0.5, seconds=20.0))
    assert result.clocks.max() - result.clocks.min() <= 2
    assert result.idle_share < 0.05


def test_averaging_runs_in_parallel_with_the_computation() -> None:
    setting = {"workers": 4, "ps": 4, "compute": 0.1, "model_bytes": 0.4, "bandwidth": 20.0, "pushes": 400}
    averaged = simulate(Setting(rule=ModelAverage(), **setting))
    pushed = simulate(Setting(rule=Asynchronous(), **setting))
    # The transfers of the model and its mean take 0.04 s, in parallel with the 0.1 s.
    assert averaged.seconds == pytest.approx(100 * 0.1, rel=0.03)
    assert pushed.seconds > 1.3 * averaged.seconds
    assert averaged.mean_staleness == pytest.approx(3, abs=0.1)


def test_a_gradient_is_applied_by_the_first_pull_after_its_delay() -> None:
    result = simulate(Setting(workers=1, rule=Delayed(2.5), compute=1.0, latency=0.025, pushes=12))
    # Pushes at 1.075, 2.175, ...; pulls at 0.025, 1.125, ...: each gradient waits for the third pull after its push.
    assert result.push_times == pytest.approx(4.425 + 1.1 * np.arange(8))
    assert result.staleness.tolist() == [0, 1, 2, 3, 3, 3, 3, 3]
    assert (result.updates, result.gradients, result.rejected) == (8, 12, 0)


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
    # Averaging is seen one step late.
    assert losses(ModelAverage()).losses == pytest.approx([2.5, *expected[:-1]])


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


def test_a_network_learns_and_the_same_way_again() -> None:
    first, again = (
        losses(rule, workers=4, compute="exponential(50ms)", pushes=1500, problem=SmallNetwork(), rate=0.5)
        for rule in (Asynchronous(), Asynchronous())
    )
    assert first.losses[-1] < 0.6 * first.losses[0]
    assert first.losses.tolist() == again.losses.tolist()
