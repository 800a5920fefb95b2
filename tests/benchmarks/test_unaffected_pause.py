"""The longest pause of a worker that nothing had befallen."""

import pytest

from benchmarks.unaffected_pause import longest_pause
from coordinator.testing.chaos import Fault

# Both workers give a result each second, but for worker 1 between 103 and 109.
RESULTS = sorted([(100.0 + at, 0) for at in range(20)] + [(100.0 + at, 1) for at in range(20) if not 3 < at < 9])


def fault(job: str, index: int, begins: float, ends: float) -> Fault:
    return Fault("kill", job, index, begins, ends)


@pytest.mark.parametrize(
    ("faults", "pause"),
    [
        ([], 6.0),
        ([fault("worker", 1, 3.5, 6.0)], 1.0),
        ([fault("worker", 1, 2.9, 3.0)], 1.0),
        ([fault("worker", 0, 3.5, 6.0)], 6.0),
        ([fault("ps", 0, 5.0, 8.0)], 1.0),
        ([fault("worker", 1, 12.0, 14.0)], 6.0),
    ],
)
def test_only_pauses_that_no_fault_explains_count(faults: list[Fault], pause: float) -> None:
    assert longest_pause(RESULTS, faults, 100.0, [0, 1]) == pause


def test_without_results_there_is_no_pause() -> None:
    assert longest_pause([], [], 0.0, [0, 1]) == 0.0
