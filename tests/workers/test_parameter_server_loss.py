"""Parameter servers that fail: what is lost besides, when, and what the caller sees."""

from collections.abc import Callable

import pytest

from coordinator.cluster import Cluster
from coordinator.errors import ClosureCancelledError, ParameterServerLost
from coordinator.testing.fake_runtime import FakeRuntime, Gate
from coordinator.workers.worker import WorkerState
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import index_of, running_cluster

PARAMETER_SERVER = "/job:ps/replica:0/task:1"


def lost_in_calls(runtime: FakeRuntime, cluster: Cluster, gate: Gate) -> None:
    cluster.schedule(gate, "held")
    gate.wait_arrived()
    runtime.lose_parameter_server(PARAMETER_SERVER)


def lost_before_any_call(runtime: FakeRuntime, cluster: Cluster, gate: Gate) -> None:
    runtime.lose_parameter_server(PARAMETER_SERVER)
    cluster.schedule(gate, "step")


def lost_with_a_worker(runtime: FakeRuntime, cluster: Cluster, gate: Gate) -> None:
    cluster.schedule(gate, "held")
    gate.wait_arrived()
    runtime.kill(0)
    runtime.lose_parameter_server(PARAMETER_SERVER)


def lost_when_no_worker_is_left(runtime: FakeRuntime, cluster: Cluster, gate: Gate) -> None:
    held = [cluster.schedule(gate, "held") for _ in cluster.workers]
    gate.wait_arrived(len(held))
    for worker in cluster.workers:
        runtime.kill(worker.index)
    wait_until(lambda: all(worker.state is WorkerState.LOST for worker in cluster.workers))
    runtime.lose_parameter_server(PARAMETER_SERVER)


CALLERS: dict[str, Callable[[Cluster, Gate], object]] = {
    "join": lambda cluster, gate: cluster.join(LIMIT),
    "schedule": lambda cluster, gate: wait_until(lambda: cluster.schedule(gate, "more") is None),
    "done": lambda cluster, gate: wait_until(cluster.done),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize(
    "loses", [lost_in_calls, lost_before_any_call, lost_with_a_worker, lost_when_no_worker_is_left]
)
def test_a_lost_parameter_server_is_raised_by_name_and_the_cluster_is_usable_when_it_is_back(
    loses: Callable[[FakeRuntime, Cluster, Gate], None], caller: str, workers: int
) -> None:
    runtime = FakeRuntime(workers)
    gate = Gate(runtime)
    with running_cluster(runtime) as cluster:
        loses(runtime, cluster, gate)
        with pytest.raises(ParameterServerLost) as caught:
            CALLERS[caller](cluster, gate)
        assert caught.value.task == PARAMETER_SERVER
        runtime.restore_parameter_server()
        for worker in range(workers):
            runtime.restart(worker)
        for worker in range(workers):
            cluster.schedule_on(worker, index_of, "hello").result(LIMIT)
        gate.open()
        cluster.schedule(gate, "step")
        cluster.join(LIMIT)


def test_a_worker_lost_while_another_closure_fails_leaves_the_users_error_to_be_raised() -> None:
    runtime = FakeRuntime(workers=2)
    gate, failing = Gate(runtime), Gate(runtime)

    def fail(worker: int) -> None:
        failing(worker)
        raise ZeroDivisionError("user's own")

    with running_cluster(runtime) as cluster:
        future, held = cluster.schedule(fail, "fail"), cluster.schedule(gate, "held")
        failing.wait_arrived()
        gate.wait_arrived()
        failing.open()
        with pytest.raises(ZeroDivisionError):
            future.result(LIMIT)
        runtime.kill(0)
        runtime.kill(1)
        with pytest.raises(ZeroDivisionError, match="user's own"):
            cluster.join(LIMIT)
        assert isinstance(held.exception(0), ClosureCancelledError)
        runtime.restart(0)
        assert cluster.schedule(index_of, "step").result(LIMIT) == 0
