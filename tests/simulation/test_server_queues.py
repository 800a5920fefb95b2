import numpy as np
import pytest

from coordinator.simulation.distribution import Constant, Exponential
from coordinator.simulation.simulated_tasks import ServerQueues

MESSAGES = 100_000


def test_messages_are_served_one_after_another() -> None:
    servers = ServerQueues(1, Constant(2.0), np.random.default_rng(0))
    assert [servers.serve(now, 0.0, 0.0) for now in (0.0, 1.0, 1.5, 10.0)] == [2.0, 4.0, 6.0, 12.0]
    seen = servers.statistics(16.0)
    assert seen.mean_wait == pytest.approx((0.0 + 1.0 + 2.5 + 0.0) / 4)
    assert seen.longest == 2
    assert seen.utilization == 0.5
    assert servers.home_free_at == 12.0


def test_a_message_may_wait_for_the_workers_own_link() -> None:
    servers = ServerQueues(4, Constant(1.0), np.random.default_rng(0))
    assert servers.serve(0.0, 0.5, 6.0) == 6.0
    assert servers.home_free_at == 1.5


def test_a_message_to_several_servers_ends_when_the_last_has_served_it() -> None:
    """Of n exponential times the greatest is 1 + 1/2 + ... + 1/n means on average."""
    servers = ServerQueues(4, Exponential(1.0), np.random.default_rng(0))
    nows = np.arange(20_000) * 1000.0
    taken = [servers.serve(now, 0.0, 0.0) - now for now in nows]
    assert np.mean(taken) == pytest.approx(1 + 1 / 2 + 1 / 3 + 1 / 4, rel=0.03)


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
