"""A cluster of two workers in memory."""

from collections.abc import Iterator

import pytest

from coordinator.testing.fake_runtime import FakeRuntime
from coordinator.workers.scheduler import Scheduler
from tests.fake_cluster import running_scheduler
from tests.virtual_clock import VirtualClock


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime(2)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def scheduler(runtime: FakeRuntime) -> Iterator[Scheduler]:
    with running_scheduler(runtime) as scheduler:
        yield scheduler
