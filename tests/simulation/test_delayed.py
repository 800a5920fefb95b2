"""Tests of delayed gradients in virtual time: when each is applied, its staleness, and the servers' time for it."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from coordinator.simulation.learning import Learning
from coordinator.simulation.rules import Delayed
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate


@dataclasses.dataclass(frozen=True)
class Numbered:
    """A custom problem: the gradients are 1, 10, 100, ... in the order in which they were computed."""

    initial: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1))
    numbers: itertools.count = dataclasses.field(default_factory=itertools.count)

    def gradient(self, parameters, generator):
        return np.array([10.0 ** next(self.numbers)])

    def loss(self, parameters):
        return float(-parameters[0])


def test_a_gradient_is_applied_by_the_first_pull_after_its_delay() -> None:
    result = simulate(Setting(workers=1, rule=Delayed(2.5), compute=1.0, latency=0.025, pushes=12))
    # Pushes at 1.075, 2.175, ...; pulls at 0.025, 1.125, ...: each gradient waits for the third pull after its push.
    assert result.push_times == pytest.approx(4.425 + 1.1 * np.arange(8))
    assert result.staleness.tolist() == [0, 1, 2, 3, 3, 3, 3, 3]
    assert (result.updates, result.gradients, result.rejected) == (8, 12, 0)


def test_gradients_are_as_stale_as_there_are_updates_during_their_delay() -> None:
    setting = {"workers": 8, "compute": "normal(50ms,5ms)", "latency": 0.0005, "pushes": 20_000}
    without, delayed = (simulate(Setting(rule=Delayed(delay), **setting)) for delay in (0, 0.5))
    rate = delayed.updates_per_second
    assert delayed.mean_staleness - without.mean_staleness == pytest.approx(0.5 * rate, rel=0.05)


def test_the_delay_may_depend_on_the_worker_and_on_the_time() -> None:
    def delay(worker: int, time: float) -> float:
        return {0: -1.0, 1: math.nan}.get(worker, 0.0 if time > 5 else 100.0)

    result = simulate(Setting(workers=3, rule=Delayed(delay), compute=1.0, latency=0.01, seconds=20.0))
    assert set(result.push_workers[result.push_times < 5.2]) == {0}
    assert set(result.push_workers) == {0, 2}
    assert result.updates == result.staleness.size < result.gradients


def test_gradients_due_at_the_same_time_are_applied_in_the_order_of_pushes() -> None:
    delays = iter([2.0, 1.0, 0.5, 100.0, 0.0, 0.0, 0.0])
    learning = Learning(Numbered(), learning_rate=1.0, evaluate_every=1)
    result = simulate(
        Setting(workers=1, rule=Delayed(lambda *_: next(delays)), compute=1.0, latency=0.1, pushes=7, learning=learning)
    )
    # Pushes at 1.3, 2.7, 4.1, ..., each followed by a pull 0.2 s later, that of the next step.
    assert result.push_times == pytest.approx([4.3, 4.3, 5.7, 7.1, 8.5])
    assert result.losses.tolist() == [0, 0, 0, 0, 11, 111, 10111, 110111]


def test_with_an_infinite_delay_nothing_is_applied() -> None:
    result = simulate(Setting(workers=4, rule=Delayed(math.inf), pushes=400))
    assert (result.updates, result.gradients, result.staleness.size) == (0, 400, 0)
    assert result.mean_staleness == result.p99_staleness == 0


def test_a_pull_waits_until_the_servers_have_made_the_updates_before_it() -> None:
    # The pull at 3.06 applies three gradients, for which the servers take a second each.
    delays = iter([2.0, 1.0, 0.0, *[math.inf] * 10])
    result = simulate(
        Setting(workers=1, rule=Delayed(lambda *_: next(delays)), compute=1.0, latency=0.01, update=1.0, pushes=8)
    )
    assert result.updates == 3
    assert result.seconds == pytest.approx(8 * 1.04 - 0.01 + 3)
    assert result.queue.utilization == pytest.approx(3 / result.seconds)
