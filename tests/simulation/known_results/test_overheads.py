from coordinator.simulation.known_results import overheads
from tests.simulation.known_results.measured_once import measured_once


def test_what_is_lost_is_what_the_table_says() -> None:
    measured = measured_once(overheads)
    assert measured.largest_error < 0.05
    assert measured.synchronous[-1] > 30 * measured.asynchronous[-1]
