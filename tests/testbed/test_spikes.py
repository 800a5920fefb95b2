import math

import pytest

from coordinator.testbed.spikes import count_spikes


@pytest.mark.parametrize(
    ("losses", "spikes"),
    [
        ([], 0),
        ([3, 2, 1, 0.5], 0),
        ([1, 1.05, 1, 1.08, 1], 0),
        ([1, 1.5, 1], 1),
        ([1, 1.05, 1.1, 1.15, 1.2], 1),  # in small steps, and it stays
        ([1, 2, 3, 4], 1),
        ([1, 2, 1.5, 2], 2),  # the second begins before the first has come back to where it began
        ([1, 2, 1.95, 2.05, 1], 1),  # what trembles at the top is no spike of its own
        ([3, 1, 1.5, 1, 0.5, 0.9, 0.3], 2),
        ([1, math.nan, math.nan], 1),
        ([1, math.inf, 1], 1),
        ([math.nan, math.nan], 0),  # lost from the beginning: it never rose
    ],
)
def test_a_spike_is_a_rise_and_ends_with_a_fall(losses: list[float], spikes: int) -> None:
    assert count_spikes(losses, 0.1) == spikes


def test_a_rise_counts_from_the_least_since_the_last_spike() -> None:
    assert count_spikes([1, 1.06, 1.12], height=0.1) == 1
    assert count_spikes([1, 1.06, 0.9, 0.96], height=0.1) == 0
