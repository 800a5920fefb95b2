import pytest

from coordinator.compat import ClusterCoordinator


@pytest.fixture
def cluster_coordinator(strategy):
    return ClusterCoordinator(strategy)
