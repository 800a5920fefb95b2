import math

import pytest

from coordinator.errors import SettingError
from coordinator.simulation.absence import Death, Pause


@pytest.mark.parametrize("make", [lambda: Pause(0, -1.0, 1.0), lambda: Pause(0, 1.0, -1.0), lambda: Death(0, math.nan)])
def test_times_before_the_beginning_are_refused(make) -> None:
    with pytest.raises(SettingError, match="must have times of at least 0"):
        make()


def test_a_death_is_for_good_unless_a_return_is_given() -> None:
    assert Death(3, 1.0).back_after == math.inf
