import pytest

from coordinator.simulation.advice import advice
from coordinator.simulation.rules.asynchronous import Asynchronous
from coordinator.simulation.rules.bounded_delay import BoundedDelay
from coordinator.simulation.rules.stale_synchronous import StaleSynchronous
from coordinator.simulation.rules.synchronous import Synchronous
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"workers": 40, "rule": BoundedDelay(3)}, "at most 4 of 40 workers can be under way. With --grads-to-wait"),
        ({"rule": BoundedDelay(0, grads_to_wait=4), "slow_down": {0: 5.0}}, "try a larger --max-delay"),
        ({"rule": StaleSynchronous(max_lead=2), "slow_down": {0: 5.0}}, "all end up at its pace"),
        ({"rule": Synchronous(4), "compute": "exponential(50ms)"}, "were computed for nothing"),
        ({"workers": 50, "update": 0.01}, "more workers bring nothing"),
    ],
)
def test_what_stands_out_is_said_with_what_to_try(setting, words: str) -> None:
    (sentence,) = advice(simulate(Setting(pushes=2000, **setting)))
    assert words in sentence


def test_nothing_is_said_where_nothing_stands_out() -> None:
    assert advice(simulate(Setting(rule=Asynchronous(), pushes=500))) == ()
