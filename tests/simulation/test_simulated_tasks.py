import math

import numpy as np
import pytest

from coordinator.errors import SettingError
from coordinator.simulation.distribution import Constant, Exponential
from coordinator.simulation.simulated_tasks import (
    Activity,
    Death,
    Pause,
    ServerQueues,
    SimulatedWorker,
    Span,
    Timeline,
)


def worker(*pauses: Pause, seconds: float = 2.0, factor: float = 1.0) -> SimulatedWorker:
    return SimulatedWorker(0, lambda: seconds, factor, pauses, Timeline(0))


@pytest.mark.parametrize(
    ("pauses", "end"),
    [
        ([], 12.0),
        ([Pause(0, 5.0, 3.0)], 12.0),
        ([Pause(0, 8.0, 3.0)], 13.0),
        ([Pause(0, 11.0, 3.0)], 15.0),
        ([Pause(0, 12.0, 3.0)], 12.0),
        # The second pause begins while the first delays the end.
        ([Pause(0, 14.0, 1.0), Pause(0, 11.0, 3.0)], 16.0),
    ],
)
def test_pauses_within_a_computation_lengthen_it(pauses: list[Pause], end: float) -> None:
    assert worker(*pauses).compute(10.0) == end


def test_an_unfinished_computation_counts_until_now() -> None:
    one = worker()
    one.compute(10.0)
    one.settle(11.5)
    assert one.computed == 1.5
    one.settle(20.0)
    assert one.computed == 1.5
    assert one.timeline is not None
    assert one.timeline.spans == [Span(Activity.COMPUTE, 10.0, 11.5)]


@pytest.mark.parametrize("make", [lambda: Pause(0, -1.0, 1.0), lambda: Pause(0, 1.0, -1.0), lambda: Death(0, math.nan)])
def test_times_before_the_beginning_are_refused(make) -> None:
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
