"""Tests of lost parameter servers: alone or with workers, at different times, and what the caller sees."""

from collections.abc import Callable

import pytest

from coordinator.errors import ClosureCancelledError, ParameterServerLost
from coordinator.testing.fake_runtime import FakeRuntime, Gate
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import index_of, running_scheduler

PARAMETER_SERVER = "/job:ps/replica:0/task:1"


def lost_in_calls(runtime: FakeRuntime, scheduler: Scheduler, gate: Gate) -> None:
    scheduler.schedule(gate, "held")
    gate.wait_arrived()
    runtime.lose_parameter_server(PARAMETER_SERVER)


def lost_before_any_call(runtime: FakeRuntime, scheduler: Scheduler, gate: Gate) -> None:
    runtime.lose_parameter_server(PARAMETER_SERVER)
    scheduler.schedule(gate, "step")


def lost_with_a_worker(runtime: FakeRuntime, scheduler: Scheduler, gate: Gate) -> None:
    scheduler.schedule(gate, "held")
    gate.wait_arrived()
    runtime.kill(0)
    runtime.lose_parameter_server(PARAMETER_SERVER)


CALLERS: dict[str, Callable[[Scheduler, Gate], object]] = {
    "join": lambda scheduler, gate: scheduler.join(LIMIT),
    "schedule": lambda scheduler, gate: wait_until(lambda: scheduler.schedule(gate, "more") is None),
    "done": lambda scheduler, gate: wait_until(scheduler.done),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("loses", [lost_in_calls, lost_before_any_call, lost_with_a_worker])
def test_the_error_names_the_lost_parameter_server_and_the_cluster_stays_usable(
    loses: Callable[[FakeRuntime, Scheduler, Gate], None], caller: str, workers: int
) -> None:
    runtime = FakeRuntime(workers)
    gate = Gate(runtime)
    with running_scheduler(runtime) as scheduler:
        loses(runtime, scheduler, gate)
        with pytest.raises(ParameterServerLost) as caught:
            CALLERS[caller](scheduler, gate)
        assert caught.value.task == PARAMETER_SERVER
        runtime.restore_parameter_server()
        for worker in range(workers):
            runtime.restart(worker)
        for worker in range(workers):
            scheduler.schedule_internal(worker, index_of, "hello").result(LIMIT)
        gate.open()
        scheduler.schedule(gate, "step")
        scheduler.join(LIMIT)


def test_the_users_error_is_raised_although_a_worker_is_lost_meanwhile() -> None:
    runtime = FakeRuntime(workers=2)
    gate, failing = Gate(runtime), Gate(runtime)

    def fail(worker: int) -> None:
        failing(worker)
        raise ZeroDivisionError("user's own")

    with running_scheduler(runtime) as scheduler:
        future, held = scheduler.schedule(fail, "fail"), scheduler.schedule(gate, "held")
        failing.wait_arrived()
        gate.wait_arrived()
        failing.open()
        with pytest.raises(ZeroDivisionError):
            future.result(LIMIT)
        runtime.kill(0)
        runtime.kill(1)
        with pytest.raises(ZeroDivisionError, match="user's own"):
            scheduler.join(LIMIT)
        assert isinstance(held.exception(0), ClosureCancelledError)
        runtime.restart(0)
        assert scheduler.schedule(index_of, "step").result(LIMIT) == 0
