"""Tests of parameter servers that are lost, with and without recovery: alone or with workers, at different times."""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator.errors import ClosureCancelledError, ParameterServerLost
from coordinator.testing.fake_runtime import FakeRuntime
from coordinator.workers.cluster import WorkerState
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, fail, hold, index_of, running_scheduler
from tests.virtual_clock import VirtualClock
from tests.workers.test_cluster import RAISERS


class Restorer:
    """Recovers the parameter server of the fake runtime, which answers again once a test restarts it."""

    def __init__(self, runtime: FakeRuntime, scheduler: Scheduler) -> None:
        self.attempts = 0
        self.recoveries = 0
        self.running_during_restore: list[int] = []
        self.error: Exception | None = None
        self._runtime = runtime
        self._scheduler = scheduler
        self._is_back = threading.Event()
        self.restart = self._is_back.set
        scheduler.recovery.recover_with(self.recover)

    def recover(self) -> bool:
        """Tries once, as the scheduler calls it."""
        self.attempts += 1
        self.running_during_restore.append(self._scheduler.cluster.statistics().running)
        if self.error is not None:
            raise self.error
        if not self._is_back.is_set():
            return False
        self._is_back.clear()
        self._runtime.restore_parameter_server()
        self.recoveries += 1
        return True


@pytest.fixture
def restorer(runtime: FakeRuntime, scheduler: Scheduler) -> Restorer:
    return Restorer(runtime, scheduler)


def lost_in_calls(runtime: FakeRuntime, scheduler: Scheduler) -> None:
    runtime.lose_parameter_server()


def lost_with_a_worker(runtime: FakeRuntime, scheduler: Scheduler) -> None:
    runtime.kill(0)
    runtime.lose_parameter_server()
    runtime.restart(0)


def lost_while_a_worker_is_away(runtime: FakeRuntime, scheduler: Scheduler) -> None:
    runtime.kill(0)
    wait_until(lambda: scheduler.cluster.workers[0].state is WorkerState.LOST)
    runtime.lose_parameter_server()


def reported_while_calls_hang(runtime: FakeRuntime, scheduler: Scheduler) -> None:
    scheduler.recovery.begin(ParameterServerLost("/job:ps/task:0", "frozen"))


LOSSES = [lost_in_calls, lost_with_a_worker, lost_while_a_worker_is_away, reported_while_calls_hang]


@pytest.mark.parametrize("loses", LOSSES)
def test_a_lost_parameter_server_fails_no_closure(
    scheduler: Scheduler, runtime: FakeRuntime, restorer: Restorer, loses: Callable[[FakeRuntime, Scheduler], None]
) -> None:
    with ThreadPoolExecutor() as pool:
        for _ in range(2):
            gate, futures = hold(scheduler, 5)
            loses(runtime, scheduler)
            joining = pool.submit(scheduler.join, LIMIT)
            attempts = restorer.attempts
            wait_until(lambda earlier=attempts: restorer.attempts > earlier + 2)
            assert not joining.done()
            assert not scheduler.recovery.wait_recovered(0.001)
            futures.append(scheduler.schedule(gate, "scheduled meanwhile"))
            restorer.restart()
            assert scheduler.recovery.wait_recovered(LIMIT)
            runtime.restart(0)
            gate.open()
            joining.result(LIMIT)
            assert all(future.exception(0) is None for future in futures)
    assert restorer.recoveries == 2
    assert set(restorer.running_during_restore) == {0}, "nothing ran while variables were restored"
    statistics = scheduler.cluster.statistics()
    assert (statistics.finished, statistics.failed, statistics.cancelled) == (12, 0, 0)


@pytest.mark.parametrize("is_given_up", [False, True])
def test_all_attempts_of_a_recovery_are_in_one_scope(
    scheduler: Scheduler, runtime: FakeRuntime, restorer: Restorer, is_given_up: bool
) -> None:
    events = []

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        events.append("begins")
        yield
        events.append(f"ends after {restorer.recoveries} recoveries")

    scheduler.recovery.recover_with(restorer.recover, scope)
    runtime.lose_parameter_server()
    wait_until(lambda: restorer.attempts > 2)
    assert events == ["begins"]
    future = scheduler.schedule(index_of, "step")
    if is_given_up:
        restorer.error = ValueError("no checkpoint")
        with pytest.raises(ValueError, match="no checkpoint"):
            scheduler.join(LIMIT)
    else:
        restorer.restart()
        assert future.result(LIMIT) in (0, 1)
    wait_until(lambda: len(events) > 1)
    assert events[:2] == ["begins", f"ends after {int(not is_given_up)} recoveries"]


def test_a_parameter_server_that_is_moved_is_recovered_at_its_new_address(
    scheduler: Scheduler, runtime: FakeRuntime
) -> None:
    move = scheduler.cluster.move_parameter_server
    with pytest.raises(RuntimeError, match=r"before strategy\.restore_from"):
        move(0, "elsewhere:2222")
    restorer = Restorer(runtime, scheduler)
    for index in (-1, 1, "0"):
        with pytest.raises(ValueError, match=r"no parameter server .* to move; there are \[0\]"):
            move(index, "elsewhere:2222")
    move(0, "elsewhere:2222")
    future = scheduler.schedule(index_of, "step")
    wait_until(lambda: restorer.attempts > 0)
    [server] = scheduler.cluster.statistics().parameter_servers
    assert (server.state, server.losses, server.recoveries) == ("lost", 1, 0)
    assert not future.done()
    restorer.restart()
    assert future.result(LIMIT) in (0, 1)
    [server] = scheduler.cluster.statistics().parameter_servers
    assert (server.state, server.losses, server.recoveries) == ("live", 1, 1)
    assert server.away_seconds > 0


def test_a_parameter_server_lost_in_a_quiet_period_is_recovered_there(
    scheduler: Scheduler, runtime: FakeRuntime, restorer: Restorer
) -> None:
    with scheduler.quiet(LIMIT):
        future = scheduler.schedule(index_of, "step")
        runtime.lose_parameter_server()
        restorer.restart()
        wait_until(lambda: restorer.recoveries == 1)
        assert not future.done()
    assert future.result(LIMIT) in (0, 1)


def test_a_parameter_server_that_stays_down_too_long_is_an_error_and_may_return(
    runtime: FakeRuntime, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    with running_scheduler(runtime, OPTIONS, clock) as scheduler:
        restorer = Restorer(runtime, scheduler)
        gate, [future] = hold(scheduler)
        runtime.lose_parameter_server("/job:ps/task:1")
        # It tries again later if the call has not ended in time.
        wait_until(lambda: clock.advance(OPTIONS.reconnect_interval) or restorer.attempts)
        assert "Recovery has waited" not in caplog.text
        clock.advance(OPTIONS.parameter_server_timeout + 1)
        with pytest.raises(ParameterServerLost, match="/job:ps/task:1"):
            scheduler.join(LIMIT)
        assert isinstance(future.exception(LIMIT), ClosureCancelledError | ParameterServerLost)
        restorer.restart()
        gate.open()
        wait_until(lambda: clock.advance(OPTIONS.reconnect_interval) or restorer.recoveries)
        scheduler.settled(LIMIT)
        scheduler.schedule(gate, "again").result(LIMIT)
        scheduler.join(LIMIT)
    assert re.search("Recovery has waited for 6[0-9]{2} s: /job:ps/task:1 was lost.", caplog.text)


def test_no_closure_uses_variables_that_could_not_be_restored() -> None:
    runtime = FakeRuntime(workers=1)
    half_restored: list[ParameterServerLost] = []
    errors = [OSError("the folder is not mounted") for _ in range(2)]
    were_restored: list[bool] = []

    def recover() -> bool:
        runtime.restore_parameter_server()
        half_restored[:] = [ParameterServerLost("/job:ps/task:0", "Its variables are being restored.")]
        if errors:
            raise errors.pop()
        half_restored.clear()
        return True

    def missing() -> ParameterServerLost | None:
        lost = runtime.lost_parameter_server()
        return half_restored[0] if lost is None and half_restored else lost

    def step(worker: int) -> None:
        were_restored.append(not half_restored)

    with running_scheduler(runtime) as scheduler:
        scheduler.recovery.recover_with(recover, missing=missing)
        runtime.lose_parameter_server()
        with pytest.raises(OSError, match="not mounted"):
            wait_until(lambda: scheduler.schedule(step, "step") is None)
        future = scheduler.schedule(step, "step")
        with pytest.raises(OSError, match="not mounted"):
            scheduler.join(LIMIT)
        assert isinstance(future.exception(LIMIT), ClosureCancelledError)
        [server] = scheduler.cluster.statistics().parameter_servers
        assert (server.state, server.recoveries) == ("lost", 0)
        before = len(were_restored)
        scheduler.schedule(step, "step").result(LIMIT)
        assert all(were_restored)
        assert len(were_restored) == before + 1
        wait_until(lambda: scheduler.cluster.statistics().parameter_servers[0].state == "live")


def test_a_restore_that_ends_the_program_or_waits_for_closures_is_an_error(
    scheduler: Scheduler, runtime: FakeRuntime
) -> None:
    def recover() -> bool:
        runtime.restore_parameter_server()
        outcomes.pop()()
        return True

    def end() -> None:
        raise SystemExit(3)

    outcomes = [scheduler.join, end]
    scheduler.recovery.recover_with(recover)
    for error, words in ((SystemExit, "3"), (RuntimeError, "on_rollback")):
        hold(scheduler)
        runtime.lose_parameter_server()
        with pytest.raises(error, match=words):
            scheduler.join(LIMIT)


# Without recovery

PARAMETER_SERVER = "/job:ps/replica:0/task:1"


def in_a_call(runtime: FakeRuntime, scheduler: Scheduler) -> None:
    hold(scheduler)
    runtime.lose_parameter_server(PARAMETER_SERVER)


def before_any_call(runtime: FakeRuntime, scheduler: Scheduler) -> None:
    runtime.lose_parameter_server(PARAMETER_SERVER)
    scheduler.schedule(index_of, "step")


def together_with_a_worker(runtime: FakeRuntime, scheduler: Scheduler) -> None:
    hold(scheduler)
    runtime.kill(0)
    runtime.lose_parameter_server(PARAMETER_SERVER)


@pytest.mark.parametrize("caller", RAISERS)
@pytest.mark.parametrize("loses", [in_a_call, before_any_call, together_with_a_worker])
def test_the_error_names_the_lost_parameter_server_and_the_cluster_stays_usable(
    scheduler: Scheduler, runtime: FakeRuntime, loses: Callable[[FakeRuntime, Scheduler], None], caller: str
) -> None:
    loses(runtime, scheduler)
    with pytest.raises(ParameterServerLost) as caught:
        RAISERS[caller](scheduler)
    assert caught.value.task == PARAMETER_SERVER
    runtime.restore_parameter_server()
    for worker in range(2):
        runtime.restart(worker)
        scheduler.schedule_internal(worker, index_of, "hello").result(LIMIT)
    scheduler.schedule(index_of, "step")
    scheduler.join(LIMIT)


def test_the_users_error_is_raised_although_a_worker_is_lost_meanwhile(
    scheduler: Scheduler, runtime: FakeRuntime
) -> None:
    _, [held] = hold(scheduler)
    assert isinstance(scheduler.schedule(fail, "fail").exception(LIMIT), ZeroDivisionError)
    for worker in range(2):
        runtime.kill(worker)
    with pytest.raises(ZeroDivisionError, match="user's own"):
        scheduler.join(LIMIT)
    assert isinstance(held.exception(0), ClosureCancelledError)
    runtime.restart(0)
    assert scheduler.schedule(index_of, "step").result(LIMIT) == 0
