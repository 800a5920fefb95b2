"""The time of evaluators, and one warning of NumPy 2 about the way in which Keras converts TensorFlow tensors."""

from pathlib import Path

import pytest

from coordinator.evaluation import SidecarEvaluator, SidecarMetrics
from tests.virtual_clock import PassingClock

KERAS_AND_NUMPY = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(KERAS_AND_NUMPY)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> PassingClock:
    """The time of all evaluators and callbacks, which passes when an evaluator waits."""
    clock = PassingClock()
    for timed in (SidecarEvaluator, SidecarMetrics):
        monkeypatch.setattr(timed, "_clock", clock)
    return clock
