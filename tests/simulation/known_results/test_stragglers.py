import pytest

from coordinator.simulation.known_results import stragglers
from tests.simulation.known_results.measured_once import measured_once


def test_synchronous_training_waits_for_the_slowest_and_averaging_does_not() -> None:
    measured = measured_once(stragglers)
    assert measured.synchronous == pytest.approx(measured.synchronous_formula, rel=0.02)
    assert measured.averaged == pytest.approx(measured.averaged_formula, rel=0.02)
