"""Parameter servers that are lost and recovered, in memory: what is lost besides, when, and what the caller sees."""

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator.cluster import Cluster
from coordinator.errors import ClosureCancelledError, ParameterServerLost
from coordinator.testing.fake_runtime import FakeRuntime, Gate
from coordinator.workers.worker import WorkerState
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, index_of, running_cluster


class Restorer:
    """What recovers the fake's parameter server: it answers only once a test says so, as a restarted process does."""

    def __init__(self, runtime: FakeRuntime, cluster: Cluster) -> None:
        self.attempts = 0
        self.recoveries = 0
        self.running_meanwhile: list[int] = []
        self.error: Exception | None = None
        self._runtime = runtime
        self._cluster = cluster
        self._is_back = threading.Event()
        cluster.recovery.recover_with(self._recover)

    def restart(self) -> None:
        self._is_back.set()

    def _recover(self) -> bool:
        self.attempts += 1
        self.running_meanwhile.append(self._cluster.statistics().running)
        if self.error is not None:
            raise self.error
        if not self._is_back.is_set():
            return False
        self._is_back.clear()
        self._runtime.restore_parameter_server()
        self.recoveries += 1
        return True


def lost_in_calls(runtime: FakeRuntime, cluster: Cluster) -> None:
    runtime.lose_parameter_server()


def lost_with_a_worker(runtime: FakeRuntime, cluster: Cluster) -> None:
    runtime.kill(0)
    runtime.lose_parameter_server()
    runtime.restart(0)


def lost_while_a_worker_is_away(runtime: FakeRuntime, cluster: Cluster) -> None:
    runtime.kill(0)
    wait_until(lambda: cluster.workers[0].state is WorkerState.LOST)
    runtime.lose_parameter_server()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("loses", [lost_in_calls, lost_with_a_worker, lost_while_a_worker_is_away])
def test_a_lost_parameter_server_costs_time_and_no_closure(
    loses: Callable[[FakeRuntime, Cluster], None], workers: int
) -> None:
    runtime = FakeRuntime(workers)
    with running_cluster(runtime) as cluster, ThreadPoolExecutor() as pool:
        restorer = Restorer(runtime, cluster)
        for _ in range(2):
            gate = Gate(runtime)
            futures = [cluster.schedule(gate, "step") for _ in range(5)]
            gate.wait_arrived(workers)
            loses(runtime, cluster)
            joining = pool.submit(cluster.join, LIMIT)
            attempts = restorer.attempts
            wait_until(lambda earlier=attempts: restorer.attempts > earlier + 2)
            assert not joining.done()
            futures.append(cluster.schedule(gate, "scheduled meanwhile"))
            restorer.restart()
            for worker in range(workers):
                runtime.restart(worker)
            gate.open()
            joining.result(LIMIT)
            assert all(future.exception(0) is None for future in futures)
        assert restorer.recoveries == 2
        assert set(restorer.running_meanwhile) == {0}, "nothing ran while variables were restored"
        statistics = cluster.statistics()
        assert (statistics.finished, statistics.failed, statistics.cancelled) == (12, 0, 0)


def test_a_parameter_server_lost_while_nothing_is_scheduled_is_recovered_before_it_is_needed() -> None:
    runtime = FakeRuntime(workers=2)
    with running_cluster(runtime) as cluster:
        restorer = Restorer(runtime, cluster)
        restorer.restart()
        runtime.lose_parameter_server()
        wait_until(lambda: restorer.recoveries == 1)
        cluster.schedule(index_of, "step")
        cluster.join(LIMIT)


def test_a_parameter_server_lost_again_during_its_recovery_is_recovered_all_the_same() -> None:
    runtime = FakeRuntime(workers=2)
    gate = Gate(runtime)
    with running_cluster(runtime) as cluster:
        restorer = Restorer(runtime, cluster)

        def lose_once_more(worker: int) -> int:
            if restorer.recoveries == 1:
                runtime.lose_parameter_server()
            return gate(worker)

        restorer.restart()
        runtime.lose_parameter_server()
        wait_until(lambda: restorer.recoveries == 1)
        future = cluster.schedule(lose_once_more, "step")
        wait_until(lambda: restorer.attempts > 2)
        gate.open()
        restorer.restart()
        future.result(LIMIT)
        cluster.join(LIMIT)


def test_calls_that_hang_on_a_lost_parameter_server_are_cancelled_and_run_again() -> None:
    runtime = FakeRuntime(workers=2)
    gate = Gate(runtime)
    with running_cluster(runtime) as cluster:
        restorer = Restorer(runtime, cluster)
        futures = [cluster.schedule(gate, "step") for _ in range(2)]
        gate.wait_arrived(2)
        cluster.recovery.begin(ParameterServerLost("/job:ps/task:0", "frozen"))
        wait_until(lambda: cluster.statistics().running == 0)
        assert not any(future.done() for future in futures)
        restorer.restart()
        gate.open()
        cluster.join(LIMIT)
        assert [future.exception(0) for future in futures] == [None, None]


def test_a_parameter_server_that_stays_away_too_long_is_an_error_and_may_still_come_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = FakeRuntime(workers=2)
    options = dataclasses.replace(OPTIONS, parameter_server_timeout=0.05, stall_report_interval=0.01)
    gate = Gate(runtime)
    with caplog.at_level(logging.WARNING, logger="coordinator"), running_cluster(runtime, options) as cluster:
        restorer = Restorer(runtime, cluster)
        future = cluster.schedule(gate, "step")
        gate.wait_arrived()
        runtime.lose_parameter_server("/job:ps/task:1")
        with pytest.raises(ParameterServerLost, match="/job:ps/task:1"):
            cluster.join(LIMIT)
        assert isinstance(future.exception(LIMIT), ClosureCancelledError | ParameterServerLost)
        restorer.restart()
        gate.open()
        wait_until(lambda: restorer.recoveries == 1)
        with contextlib.suppress(ParameterServerLost):
            cluster.join(LIMIT)  # It may have been away for another while, by now.
        cluster.schedule(gate, "again").result(LIMIT)
        cluster.join(LIMIT)
    assert "Recovery has waited for 0 s: /job:ps/task:1 was lost." in caplog.text


def test_what_makes_recovery_impossible_is_raised_even_if_nothing_was_scheduled() -> None:
    runtime = FakeRuntime(workers=1)
    with running_cluster(runtime) as cluster:
        restorer = Restorer(runtime, cluster)
        restorer.error = OSError("the checkpoint is unreadable")
        runtime.lose_parameter_server()
        wait_until(lambda: restorer.attempts > 0)
        with pytest.raises(OSError, match="unreadable"):
            wait_until(lambda: cluster.schedule(index_of, "more") is None)
        restorer.error = None
        restorer.restart()
        wait_until(lambda: restorer.recoveries == 1)


def test_close_does_not_wait_for_a_recovery() -> None:
    runtime = FakeRuntime(workers=2)
    gate = Gate(runtime)
    with running_cluster(runtime) as cluster:
        restorer = Restorer(runtime, cluster)
        future = cluster.schedule(gate, "step")
        gate.wait_arrived()
        runtime.lose_parameter_server()
        wait_until(lambda: restorer.attempts > 0)
    assert isinstance(future.exception(0), ClosureCancelledError)


def test_whoever_waits_for_the_recovery_learns_of_its_end() -> None:
    runtime = FakeRuntime(workers=1)
    with running_cluster(runtime) as cluster, ThreadPoolExecutor() as pool:
        restorer = Restorer(runtime, cluster)
        assert cluster.recovery.wait_recovered(LIMIT)
        runtime.lose_parameter_server()
        assert not cluster.recovery.wait_recovered(0.001)
        waiting = pool.submit(cluster.recovery.wait_recovered, LIMIT)
        restorer.restart()
        assert waiting.result(LIMIT)
