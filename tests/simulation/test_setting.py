import math

import pytest

from coordinator.errors import SettingError
from coordinator.simulation.distribution import Constant, LogNormal
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_tasks import Death


def test_each_worker_may_have_its_own_computation_time() -> None:
    setting = Setting(workers=3, compute=["20ms", 0.03, LogNormal(0.05, 0.4)])
    assert setting.compute_of_each == (Constant(0.02), Constant(0.03), LogNormal(0.05, 0.4))


def test_the_last_workers_are_the_stragglers_and_factors_multiply() -> None:
    setting = Setting(workers=10, stragglers=0.2, straggler_factor=3.0, slow_down={0: 2.0, 9: 2.0})
    assert setting.factors == (2.0, *[1.0] * 7, 3.0, 6.0)


def test_the_simulation_ends_after_enough_pushes_by_default() -> None:
    assert Setting().pushes == 20_000
    assert Setting(workers=1000).pushes == 100_000
    assert Setting(seconds=1.0).pushes is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"workers": 0}, "workers must be an integer of at least 1, got 0"),
        ({"pushes": 0}, "pushes must be an integer of at least 1"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"rule": "asynchronous"}, "rule must be a rule such as"),
        ({"workers": 2, "compute": [0.1]}, "compute must be one distribution, or one for each of 2 workers; has 1"),
        ({"latency": -0.1}, "latency must be a number of seconds of at least 0, a text or a distribution"),
        ({"stragglers": 1.5}, "stragglers must be a number from 0 to 1"),
        ({"bandwidth": 0}, "bandwidth must be a number above 0"),
        ({"update": math.nan}, "update must be a number of at least 0"),
        ({"slow_down": {0: 0.0}}, "slow_down must have factors above 0"),
        ({"slow_down": {4: 2.0}}, "slow_down must name workers from 0 to 3, got 4"),
        ({"deaths": [Death(9, 0.0)]}, "deaths must name workers from 0 to 3, got 9"),
        ({"compute": 0.0, "seconds": 1.0}, "compute must be above 0"),
    ],
)
def test_an_invalid_setting_is_refused_with_the_allowed_values(given, reason: str) -> None:
    with pytest.raises(SettingError, match=f"^{reason}"):
        Setting(**given)
