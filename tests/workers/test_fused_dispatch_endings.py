"""What happens to closures that run in one call when the call fails or is cancelled.

what happens in the call             what happens to its closures
nothing                              each has its result, in order
one of them fails                    all run again, each alone; the error is that of the one
the worker is lost                   all run again, each alone; the loss counts for each
a parameter server is lost for good  the first of them raises it; the others are withdrawn
one is cancelled                     it has no result; the others have theirs
all are cancelled                    the call is cancelled
another closure fails, or close      they are withdrawn, as if each ran alone
"""

import dataclasses
import logging
import threading
from collections.abc import Callable

import pytest

from coordinator.errors import ClosureCancelledError, ClosureQuarantined, ParameterServerLost
from coordinator.testing.fake_runtime import FakeRuntime, Gate, TransientError
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import running_scheduler
from tests.workers.fusible_steps import FOUR, behind_a_gate, recorder, results, schedule


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime(1)


def fail(_: int) -> None:
    raise ZeroDivisionError("mine")


def test_an_error_fails_its_closure_and_the_others_have_results(runtime: FakeRuntime) -> None:
    order: list[int] = []
    with running_scheduler(runtime, dataclasses.replace(FOUR, stop_on_error=False)) as scheduler:
        gate = behind_a_gate(scheduler, runtime)
        first, second, third, fourth = schedule(
            scheduler, [recorder(order, 0), recorder(order, 1), fail, recorder(order, 3)]
        )
        gate.open()
        error = third.exception(LIMIT)
        assert results([first, second, fourth]) == [0, 1, 3]
        assert isinstance(error, ZeroDivisionError)
        assert len(error.__notes__) == 1
        # The first two ran before the error, and again after it.
        assert order == [0, 1, 0, 1, 3]
        assert runtime.fused_calls == [(0, 4)]
        statistics = scheduler.cluster.statistics()
        assert (statistics.finished, statistics.failed, statistics.retried) == (4, 1, 4)


def test_the_error_of_another_closure_cancels_a_whole_call() -> None:
    runtime = FakeRuntime(2)
    with running_scheduler(runtime, FOUR) as scheduler:
        gates = [behind_a_gate(scheduler, runtime, worker) for worker in (0, 1)]
        never = Gate(runtime)
        futures = schedule(scheduler, [never] * 4)
        gates[0].open()
        never.wait_arrived()
        # First: the free worker would take what waits for all workers.
        scheduler.schedule(fail, "other", worker=1)
        gates[1].open()
        with pytest.raises(ZeroDivisionError):
            scheduler.join(LIMIT)
        assert all(isinstance(future.exception(LIMIT), ClosureCancelledError) for future in futures)


def test_a_lost_workers_closures_are_requeued_in_order_and_then_run_alone(
    runtime: FakeRuntime,
) -> None:
    order: list[int] = []
    with running_scheduler(runtime, FOUR) as scheduler:
        gate, inner = behind_a_gate(scheduler, runtime), Gate(runtime)
        futures = schedule(scheduler, [inner, *[recorder(order, number) for number in range(1, 6)]])
        gate.open()
        inner.wait_arrived()
        runtime.kill(0)
        wait_until(lambda: scheduler.cluster.statistics().waiting == 6)
        assert scheduler.cluster.statistics().retried == 4
        inner.open()
        runtime.restart(0)
        assert results(futures) == [0, 1, 2, 3, 4, 5]
        assert order == [1, 2, 3, 4, 5]
        # The four that were tried before are not fused, the two behind them are.
        assert runtime.fused_calls == [(0, 4), (0, 2)]


def test_a_closure_that_kills_workers_is_quarantined_without_those_fused_with_it(runtime: FakeRuntime) -> None:
    def kill(worker: int) -> None:
        runtime.kill(worker)
        runtime.restart(worker)

    with running_scheduler(runtime, FOUR) as scheduler:
        gate = behind_a_gate(scheduler, runtime)
        first, failing, third, fourth = schedule(scheduler, [lambda _: 0, kill, lambda _: 2, lambda _: 3])
        gate.open()
        error = failing.exception(LIMIT)
        assert isinstance(error, ClosureQuarantined)
        assert "attempt 3 on worker 0" in str(error)
        assert results([first, third, fourth]) == [0, 2, 3]
        assert runtime.fused_calls == [(0, 4)]
        with pytest.raises(ClosureQuarantined):
            scheduler.join(LIMIT)


def test_cancelling_one_future_of_a_call_does_not_cancel_the_others(runtime: FakeRuntime) -> None:
    order: list[int] = []
    with running_scheduler(runtime, FOUR) as scheduler:
        gate, inner = behind_a_gate(scheduler, runtime), Gate(runtime)
        futures = schedule(scheduler, [inner, *[recorder(order, number) for number in range(1, 4)]])
        gate.open()
        inner.wait_arrived()
        assert futures[2].cancel()
        assert futures[2].cancelled()
        inner.open()
        assert results([futures[0], futures[1], futures[3]]) == [0, 1, 3]
        scheduler.join(LIMIT)
        # It ran nevertheless.
        assert order == [1, 2, 3]
        assert (scheduler.cluster.statistics().finished, scheduler.cluster.statistics().cancelled) == (4, 1)


def test_a_call_of_which_all_futures_are_cancelled_is_cancelled(runtime: FakeRuntime) -> None:
    with running_scheduler(runtime, FOUR) as scheduler:
        gate, never = behind_a_gate(scheduler, runtime), Gate(runtime)
        futures = schedule(scheduler, [never] * 4)
        gate.open()
        never.wait_arrived()
        assert all(future.cancel() for future in futures)
        scheduler.join(LIMIT)


def test_a_lost_parameter_server_is_reported_although_the_worker_dies_as_well(
    runtime: FakeRuntime,
) -> None:
    # No other thread notices it meanwhile.
    with running_scheduler(runtime, dataclasses.replace(FOUR, heartbeat_interval=LIMIT)) as scheduler:
        gate = behind_a_gate(scheduler, runtime)

        def die(worker: int) -> None:
            runtime.lose_parameter_server()
            runtime.kill(worker)

        futures = schedule(scheduler, [die, *[lambda _: 1] * 5])
        gate.open()
        with pytest.raises(ParameterServerLost):
            scheduler.join(LIMIT)
        first, *others = [future.exception(LIMIT) for future in futures]
        assert isinstance(first, ParameterServerLost)
        assert all(isinstance(error, ClosureCancelledError) for error in others)
        assert runtime.fused_calls == [(0, 4)]


def test_the_call_of_a_removed_worker_is_requeued_as_a_whole() -> None:
    runtime = FakeRuntime(2)
    with running_scheduler(runtime, FOUR) as scheduler:
        gates = [behind_a_gate(scheduler, runtime, worker) for worker in (0, 1)]
        never = Gate(runtime)
        waiting = [threading.Event() for _ in range(4)]

        def body(event: threading.Event) -> Callable[[int], int]:
            return lambda worker: never(worker) if worker == 0 else event.set() or worker

        futures = schedule(scheduler, [body(event) for event in waiting])
        gates[0].open()
        never.wait_arrived()
        gates[1].open()
        scheduler.cluster.remove_worker(0, timeout=0.01)
        assert results(futures) == [1] * 4


def test_a_transient_failure_has_each_closure_of_the_call_run_again_alone(
    runtime: FakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = iter([True])

    def refuse_once(_: int) -> int:
        if next(refusals, False):
            raise TransientError
        return 1

    with caplog.at_level(logging.INFO, logger="coordinator"), running_scheduler(runtime, FOUR) as scheduler:
        gate = behind_a_gate(scheduler, runtime)
        futures = schedule(scheduler, [lambda _: 0, refuse_once, lambda _: 2, lambda _: 3])
        gate.open()
        assert results(futures) == [0, 1, 2, 3]
        assert scheduler.cluster.statistics().retried == 4
    assert runtime.fused_calls == [(0, 4)]
    assert "4 calls of step in one failed and are run again, each alone: transient (TransientError)" in caplog.text
