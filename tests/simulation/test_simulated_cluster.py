"""Tests that compare the simulation with calculations by hand, and its queues with queueing theory."""

import math

import numpy as np
import pytest

from coordinator.errors import SettingError
from coordinator.simulation.distribution import Constant, Exponential
from coordinator.simulation.rules import BoundedDelay, StaleSynchronous
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate
from coordinator.simulation.simulated_tasks import Activity, Death, Pause, ServerQueues, SimulatedWorker, Timeline


def test_the_time_of_a_step_is_the_sum_of_its_messages_update_and_computation() -> None:
    result = simulate(Setting(workers=1, compute=0.05, latency=0.005, service=0.001, update=0.002, pushes=11))
    step = 4 * 0.005 + 2 * 0.001 + 0.002 + 0.05
    assert np.diff(result.push_times) == pytest.approx([step] * 10)
    # The first request, the model, the computation, the gradient.
    assert result.push_times[0] == pytest.approx(3 * 0.005 + 0.001 + 0.05)
    assert result.computed[0] == pytest.approx(11 * 0.05)


def test_bytes_take_time_on_the_workers_link_and_on_each_server() -> None:
    alone = simulate(Setting(workers=1, ps=4, compute=1.0, model_bytes=400.0, bandwidth=100.0, pushes=11))
    # 4 s for the model and 4 s for the gradient; each server is busy for a second of either.
    assert np.diff(alone.push_times) == pytest.approx([9.0] * 10)
    crowd = simulate(
        Setting(workers=40, ps=4, compute=1.0, model_bytes=400.0, gradient_bytes=0.0, bandwidth=100.0, pushes=400)
    )
    # The servers can send one model a second.
    assert crowd.gradients_per_second == pytest.approx(1.0, rel=0.05)
    assert crowd.queue.utilization == pytest.approx(1.0, abs=0.02)


def test_between_steps_a_worker_has_no_gradient_in_flight() -> None:
    """Seven of eight workers are somewhere in their steps; a fifth of their time they are between steps."""
    result = simulate(Setting(workers=8, compute="normal(40ms,5ms)", dispatch="exponential(10ms)", pushes=8000))
    assert result.gradients_per_second == pytest.approx(8 / 0.05, rel=0.02)
    assert result.mean_staleness == pytest.approx(7 * 0.8, rel=0.03)
    assert result.communicate_share == pytest.approx(0.2, rel=0.03)


def test_workers_have_the_times_that_they_were_given() -> None:
    result = simulate(Setting(workers=3, compute=[0.1, 0.2, 0.4], seconds=40.05))
    assert result.clocks.tolist() == [400, 200, 100]
    assert result.seconds == pytest.approx(40.05)
    assert result.computed == pytest.approx([40.05] * 3)


def test_stragglers_and_slow_steps_take_their_factor_as_long() -> None:
    result = simulate(Setting(workers=4, compute=0.1, stragglers=0.25, straggler_factor=4.0, seconds=80.05))
    assert result.clocks.tolist() == [800, 800, 800, 200]
    slow = simulate(Setting(workers=1, compute=0.1, slow_steps=0.1, slow_step_factor=11.0, pushes=5000))
    assert slow.seconds / 5000 == pytest.approx(0.2, rel=0.1)


def test_a_pause_lengthens_one_step_and_no_later_one() -> None:
    result = simulate(Setting(workers=1, compute=1.0, pauses=[Pause(0, 2.5, 10.0)], pushes=5))
    assert result.push_times == pytest.approx([1.0, 2.0, 13.0, 14.0, 15.0])


def test_a_dead_workers_step_is_lost_and_it_begins_another_when_it_returns() -> None:
    result = simulate(Setting(workers=2, compute=1.0, deaths=[Death(1, 2.5, back_after=2.0)], seconds=7.75))
    assert result.push_times[result.push_workers == 1] == pytest.approx([1.0, 2.0, 5.5, 6.5, 7.5])
    assert result.absent == pytest.approx([0.0, 2.0])
    (span,) = (span for span in result.timelines[1].spans if span.activity is Activity.DEAD)
    assert (span.start, span.end) == pytest.approx((2.5, 4.5))


@pytest.mark.parametrize("rule", [BoundedDelay(0, grads_to_wait=2), StaleSynchronous(max_lead=1)], ids=str)
def test_no_worker_waits_for_a_dead_one_once_its_death_is_known(rule) -> None:
    result = simulate(Setting(workers=2, rule=rule, compute=1.0, deaths=[Death(1, 2.5)], detection=5.0, seconds=20.0))
    mine = result.push_times[result.push_workers == 0]
    assert not any(3.5 < time < 7.5 for time in mine)
    assert len(mine[mine > 7.5]) >= 10
    assert result.waited[0] == pytest.approx(4.5, abs=1.0)


def test_the_simulation_ends_when_all_workers_are_permanently_dead() -> None:
    deaths = [Death(0, 2.5), Death(1, 4.5), Death(1, 5.0)]
    result = simulate(Setting(workers=2, compute=1.0, deaths=deaths, seconds=100.0))
    assert result.seconds == pytest.approx(4.5)
    assert result.clocks.tolist() == [2, 4]


def test_a_seed_gives_the_same_result_and_another_seed_another() -> None:
    setting = {"workers": 20, "compute": "lognormal(50ms,0.4)", "latency": "exponential(1ms)", "pushes": 2000}
    first, again, other = (simulate(Setting(seed=seed, **setting)) for seed in (1, 1, 2))
    assert first.push_times.tolist() == again.push_times.tolist()
    assert first.staleness.tolist() == again.staleness.tolist()
    assert first.push_times.tolist() != other.push_times.tolist()


def test_pauses_within_a_computation_lengthen_it() -> None:
    for pauses, end in (
        ([], 12.0),
        ([Pause(0, 5.0, 3.0)], 12.0),
        ([Pause(0, 8.0, 3.0)], 13.0),
        ([Pause(0, 11.0, 3.0)], 15.0),
        ([Pause(0, 12.0, 3.0)], 12.0),
        # The second pause begins while the first delays the end.
        ([Pause(0, 14.0, 1.0), Pause(0, 11.0, 3.0)], 16.0),
    ):
        assert SimulatedWorker(0, lambda: 2.0, 1.0, pauses, Timeline(0)).compute(10.0) == end


def test_times_before_the_beginning_are_refused() -> None:
    for make in (lambda: Pause(0, -1.0, 1.0), lambda: Pause(0, 1.0, -1.0), lambda: Death(0, math.nan)):
        with pytest.raises(SettingError, match="must be a number of seconds of at least 0"):
            make()


MESSAGES = 100_000


@pytest.mark.parametrize(
    ("service", "wait"),
    [
        # Pollaczek and Khinchine: at a load of 0.8, 0.8 / (2 * 0.2) services if constant, twice that if exponential.
        (Constant(1.0), 2.0),
        (Exponential(1.0), 4.0),
    ],
)
def test_arrivals_at_random_wait_for_as_long_as_queueing_theory_says(service, wait: float) -> None:
    generator = np.random.default_rng(1)
    servers = ServerQueues(1, service, generator)
    for now in np.cumsum(generator.exponential(1 / 0.8, MESSAGES)).tolist():
        servers.serve(now, 0.0, 0.0)
    seen = servers.statistics(1.0)
    assert seen.mean_wait == pytest.approx(wait, rel=0.1)
    # An arrival finds the average number of messages: by Little's law the load, and those that wait.
    assert seen.mean_length == pytest.approx(0.8 * (wait + 1.0), rel=0.1)
