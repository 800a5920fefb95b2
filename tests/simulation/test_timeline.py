import math

from coordinator.simulation.timeline import Activity, Lane, Span


def test_a_lane_has_what_took_time_in_order() -> None:
    lane = Lane(3)
    lane.add(Activity.COMPUTE, 0.0, 1.0)
    lane.add(Activity.WAIT, 1.0, 1.0)
    lane.add(Activity.WAIT, 1.5, 2.0)
    assert lane.spans == [Span(Activity.COMPUTE, 0.0, 1.0), Span(Activity.WAIT, 1.5, 2.0)]
    assert lane.known_until == math.inf


def test_what_a_death_prevents_is_cut_off() -> None:
    lane = Lane(3)
    for start in (0.0, 1.0, 2.0):
        lane.add(Activity.COMPUTE, start, start + 1.0)
    lane.cut(1.5)
    assert lane.spans == [Span(Activity.COMPUTE, 0.0, 1.0), Span(Activity.COMPUTE, 1.0, 1.5)]


def test_a_lane_that_is_full_says_until_when_it_knows() -> None:
    lane = Lane(3)
    for start in range(5000):
        lane.add(Activity.COMPUTE, start, start + 1)
    assert lane.known_until == len(lane.spans) == 1000
