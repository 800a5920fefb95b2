"""An event that can be scheduled again and again, which simpy itself has not: what another simpy might break."""

import simpy

from coordinator.simulation.arrival import Arrival


def test_an_arrival_happens_as_often_as_it_is_scheduled_each_time_when_it_is_due() -> None:
    environment, seen = simpy.Environment(), []

    def happen(arrival: Arrival) -> None:
        seen.append((environment.now, arrival.worker))
        if len(seen) < 3:
            arrival.due_in(2.0)

    Arrival(environment, happen, "me").due_in(1.0)
    environment.run()
    assert seen == [(1.0, "me"), (3.0, "me"), (5.0, "me")]


def test_one_that_is_dropped_does_not_happen_and_disturbs_nobody() -> None:
    environment, seen = simpy.Environment(), []
    arrivals = [Arrival(environment, lambda arrival: seen.append(arrival.worker), name) for name in ("one", "other")]
    for arrival in arrivals:
        arrival.due_in(1.0)
    arrivals[0].drop()
    environment.run()
    assert seen == ["other"]
