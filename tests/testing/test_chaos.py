"""Tests of random faults: the plan depends only on seed and arguments, and every server runs again at the end."""

import itertools

import pytest

from coordinator.testing import Chaos, LocalCluster
from coordinator.testing.chaos import KINDS, Fault, plan
from tests.deadline import wait_until

SERVERS = [("ps", 0), ("worker", 0), ("worker", 1), ("worker", 2)]


def first(count: int, seed: int = 1, servers: list[tuple[str, int]] = SERVERS) -> list[Fault]:
    return list(itertools.islice(plan(seed, servers, KINDS, 5.0, (1.0, 10.0)), count))


def test_the_same_seed_gives_the_same_faults_and_another_one_others() -> None:
    assert first(50) == first(50)
    assert first(50) != first(50, seed=2)
    assert {fault.kind for fault in first(50)} == set(KINDS)
    assert {(fault.job, fault.index) for fault in first(200)} == set(SERVERS)


def test_a_server_has_one_fault_at_a_time_and_one_worker_is_spared() -> None:
    faults = first(500)
    assert all(earlier.begins <= later.begins for earlier, later in itertools.pairwise(faults))
    for number, fault in enumerate(faults):
        away = [other for other in faults[:number] if other.ends > fault.begins]
        assert (fault.job, fault.index) not in {(other.job, other.index) for other in away}
        assert sum(other.job == "worker" for other in [*away, fault]) <= 2
        assert fault.ends == fault.begins if fault.kind == "restart" else 1.0 <= fault.ends - fault.begins <= 10.0


@pytest.mark.long
@pytest.mark.cluster
def test_every_server_runs_again_when_the_chaos_is_stopped() -> None:
    with LocalCluster(workers=1, ps=1) as cluster:
        with pytest.raises(ValueError, match="one worker is always spared"):
            Chaos(cluster, seed=0)
        with pytest.raises(ValueError, match="Chaos knows kill, restart, freeze"):
            Chaos(cluster, seed=0, jobs=("ps",), kinds=("burn",))
        with Chaos(cluster, seed=3, jobs=("worker", "ps"), interval=0.2, duration=(0.1, 1000.0)) as chaos:
            before = dict(cluster.processes)
            wait_until(lambda: cluster.processes != before or chaos.faults)
        assert all(cluster.is_alive(*server) for server in cluster.processes)
        assert {fault.job for fault in chaos.faults} == {"ps"}, "the only worker is spared"
        assert all(0 < fault.begins <= fault.ends for fault in chaos.faults)
