"""Closures that run in one call: each keeps its own future, result, error and fate.

what happens in the call             what becomes of its closures
nothing                              each has its result, in order
one of them fails                    all run again, each alone; the error is that one's
the worker is lost                   all run again, each alone; the loss counts for each
one is cancelled                     it has no result; the others have theirs
all are cancelled                    the call is cancelled
another closure fails, or close      they are withdrawn, as if each ran alone
"""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from coordinator.closure import Closure
from coordinator.cluster import Cluster
from coordinator.errors import ClosureCancelledError, ClosureQuarantined
from coordinator.future import Future
from coordinator.runtime import Likeness
from coordinator.testing.fake_runtime import FakeRuntime, Gate, TransientError
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, running_cluster

FOUR = dataclasses.replace(OPTIONS, steps_per_dispatch=4)
LIKE_OTHERS = Likeness("step", ())


@dataclasses.dataclass
class Step:
    """Work like all other steps of its likeness."""

    body: Callable[[int], Any]
    likeness: Likeness | None = LIKE_OTHERS

    def __call__(self, worker: int) -> Any:
        return self.body(worker)


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime(1)


def behind_a_gate(cluster: Cluster, runtime: FakeRuntime, worker: int | None = 0) -> Gate:
    """Keeps a worker busy until the gate is opened, so that what is scheduled now waits for it."""
    gate = Gate(runtime)
    cluster.schedule(gate, "gate", worker=worker)
    gate.wait_arrived()
    return gate


def schedule(cluster: Cluster, bodies: Sequence[Callable[[int], Any]], **settings: Any) -> list[Future]:
    return [cluster.schedule(Step(body), "step", **settings) for body in bodies]


def recorder(order: list[int], number: int) -> Callable[[int], int]:
    def body(_: int) -> int:
        order.append(number)
        return number

    return body


def results(futures: Sequence[Future]) -> list[Any]:
    return [future.result(LIMIT) for future in futures]


def test_closures_that_wait_in_a_row_run_in_one_call_in_order_and_each_has_its_own_result(runtime: FakeRuntime) -> None:
    order: list[int] = []
    with running_cluster(runtime, FOUR) as cluster:
        gate = behind_a_gate(cluster, runtime)
        futures = schedule(cluster, [recorder(order, number) for number in range(10)])
        gate.open()
        assert results(futures) == order == list(range(10))
        cluster.join(LIMIT)
        assert runtime.fused_calls == [(0, 4), (0, 4), (0, 2)]
        assert cluster.statistics().finished == 11
        assert cluster.statistics().workers[0].finished == 11


def test_a_closure_does_not_wait_for_others_like_it(runtime: FakeRuntime) -> None:
    with running_cluster(runtime, FOUR) as cluster:
        assert results(schedule(cluster, [lambda _: 1])) == [1]
    assert runtime.fused_calls == []


def test_all_closures_of_a_call_are_running(runtime: FakeRuntime) -> None:
    with running_cluster(runtime, FOUR) as cluster:
        gate, inner = behind_a_gate(cluster, runtime), Gate(runtime)
        futures = schedule(cluster, [inner] * 5)
        gate.open()
        inner.wait_arrived()
        assert [future.running() for future in futures] == [True] * 4 + [False]
        assert (cluster.statistics().running, cluster.statistics().waiting) == (4, 1)
        inner.open()
        cluster.join(LIMIT)


@pytest.mark.parametrize(("most", "sizes"), [(1, []), (2, [2, 2, 2]), (3, [3, 3]), (100, [4, 2])])
def test_the_most_steps_of_a_call_can_be_chosen(runtime: FakeRuntime, most: int, sizes: list[int]) -> None:
    options = dataclasses.replace(OPTIONS, steps_per_dispatch=most)
    with running_cluster(runtime, options) as cluster:
        gate = behind_a_gate(cluster, runtime)
        futures = schedule(cluster, [lambda _: None] * 6)
        gate.open()
        results(futures)
    assert [size for _, size in runtime.fused_calls] == sizes


def test_short_steps_are_fused_without_being_told_so(runtime: FakeRuntime) -> None:
    with running_cluster(runtime) as cluster:
        while not runtime.fused_calls:
            gate = behind_a_gate(cluster, runtime)
            futures = schedule(cluster, [lambda _: None] * 64)
            gate.open()
            results(futures)


def test_no_worker_takes_more_than_its_share_of_what_waits() -> None:
    runtime = FakeRuntime(2)
    with running_cluster(runtime, dataclasses.replace(OPTIONS, steps_per_dispatch=64)) as cluster:
        gates = [behind_a_gate(cluster, runtime, worker) for worker in (0, 1)]
        inner = Gate(runtime)
        futures = schedule(cluster, [inner] * 10)
        gates[0].open()
        inner.wait_arrived()
        assert cluster.statistics().waiting == 6
        gates[1].open()
        inner.open()
        assert len(results(futures)) == 10
    assert runtime.fused_calls[0] == (0, 4)


def test_a_lost_worker_has_no_share() -> None:
    runtime = FakeRuntime(2)
    with running_cluster(runtime, dataclasses.replace(OPTIONS, steps_per_dispatch=64)) as cluster:
        runtime.kill(1)
        wait_until(lambda: cluster.statistics().workers[1].state == "lost")
        gate = behind_a_gate(cluster, runtime)
        futures = schedule(cluster, [lambda _: None] * 8)
        gate.open()
        results(futures)
    assert runtime.fused_calls == [(0, 8)]


def test_closures_that_are_not_alike_run_in_calls_of_their_own_and_in_order(runtime: FakeRuntime) -> None:
    order: list[int] = []
    likenesses = [Likeness("a", ()), Likeness("a", ()), Likeness("b", ()), Likeness("b", 1), None, None]
    with running_cluster(runtime, FOUR) as cluster:
        gate = behind_a_gate(cluster, runtime)
        futures = [
            cluster.schedule(Step(recorder(order, number), likeness), "step")
            for number, likeness in enumerate(likenesses)
        ]
        gate.open()
        results(futures)
    assert order == list(range(6))
    assert runtime.fused_calls == [(0, 2)]


@pytest.mark.parametrize("settings", [{"worker": 0}, {"timeout": LIMIT}], ids=["for one worker", "with a time limit"])
def test_closures_that_ask_for_more_than_to_be_run_are_not_fused(
    runtime: FakeRuntime, settings: dict[str, Any]
) -> None:
    with running_cluster(runtime, FOUR) as cluster:
        gate = behind_a_gate(cluster, runtime)
        futures = schedule(cluster, [lambda _: 1] * 4, **settings)
        gate.open()
        assert results(futures) == [1] * 4
    assert runtime.fused_calls == []


@pytest.mark.parametrize("limits", [{"max_attempts": 1}, {"transient_retries": 0}])
def test_nothing_is_fused_where_a_neighbours_failure_would_be_the_end_of_a_closure(
    runtime: FakeRuntime, limits: dict[str, int]
) -> None:
    with running_cluster(runtime, dataclasses.replace(FOUR, **limits)) as cluster:
        gate = behind_a_gate(cluster, runtime)
        futures = schedule(cluster, [lambda _: 1] * 4)
        gate.open()
        results(futures)
    assert runtime.fused_calls == []


def fail(_: int) -> None:
    raise ZeroDivisionError("mine")


def test_an_error_is_that_of_its_own_closure_and_the_others_have_their_results(runtime: FakeRuntime) -> None:
    order: list[int] = []
    with running_cluster(runtime, dataclasses.replace(FOUR, stop_on_error=False)) as cluster:
        gate = behind_a_gate(cluster, runtime)
        first, second, third, fourth = schedule(
            cluster, [recorder(order, 0), recorder(order, 1), fail, recorder(order, 3)]
        )
        gate.open()
        error = third.exception(LIMIT)
        assert results([first, second, fourth]) == [0, 1, 3]
        assert isinstance(error, ZeroDivisionError)
        assert len(error.__notes__) == 1
        # The first two ran before the error, and again after it.
        assert order == [0, 1, 0, 1, 3]
        assert runtime.fused_calls == [(0, 4)]
        statistics = cluster.statistics()
        assert (statistics.finished, statistics.failed, statistics.retried) == (4, 1, 4)


def test_a_function_that_failed_in_a_call_of_several_is_run_alone_afterwards(runtime: FakeRuntime) -> None:
    with running_cluster(runtime, dataclasses.replace(FOUR, stop_on_error=False)) as cluster:
        for _ in range(2):
            gate = behind_a_gate(cluster, runtime)
            futures = schedule(cluster, [lambda _: None, fail, lambda _: None, lambda _: None])
            gate.open()
            assert isinstance(futures[1].exception(LIMIT), ZeroDivisionError)
            results([futures[0], *futures[2:]])
    assert runtime.fused_calls == [(0, 4)]


def test_an_error_withdraws_the_others_if_it_is_to_stop_everything(runtime: FakeRuntime) -> None:
    with running_cluster(runtime, FOUR) as cluster:
        gate = behind_a_gate(cluster, runtime)
        first, second, *rest = schedule(cluster, [lambda _: 0, fail, *[lambda _: 1] * 6])
        gate.open()
        with pytest.raises(ZeroDivisionError, match="mine"):
            cluster.join(LIMIT)
        assert first.result(LIMIT) == 0
        assert isinstance(second.exception(LIMIT), ZeroDivisionError)
        assert all(isinstance(future.exception(LIMIT), ClosureCancelledError) for future in rest)
        assert results(schedule(cluster, [lambda _: 2])) == [2]


def test_the_error_of_another_closure_cancels_a_whole_call() -> None:
    runtime = FakeRuntime(2)
    with running_cluster(runtime, FOUR) as cluster:
        gates = [behind_a_gate(cluster, runtime, worker) for worker in (0, 1)]
        never = Gate(runtime)
        futures = schedule(cluster, [never] * 4)
        gates[0].open()
        never.wait_arrived()
        gates[1].open()
        cluster.schedule(fail, "other", worker=1)
        with pytest.raises(ZeroDivisionError):
            cluster.join(LIMIT)
        assert all(isinstance(future.exception(LIMIT), ClosureCancelledError) for future in futures)


def test_a_lost_worker_hands_all_closures_of_its_call_back_in_order_and_each_then_runs_alone(
    runtime: FakeRuntime,
) -> None:
    order: list[int] = []
    with running_cluster(runtime, FOUR) as cluster:
        gate, inner = behind_a_gate(cluster, runtime), Gate(runtime)
        futures = schedule(cluster, [inner, *[recorder(order, number) for number in range(1, 6)]])
        gate.open()
        inner.wait_arrived()
        runtime.kill(0)
        wait_until(lambda: cluster.statistics().waiting == 6)
        assert cluster.statistics().retried == 4
        inner.open()
        runtime.restart(0)
        assert results(futures) == [0, 1, 2, 3, 4, 5]
        assert order == [1, 2, 3, 4, 5]
        # The four that were tried before are not fused, the two behind them are.
        assert runtime.fused_calls == [(0, 4), (0, 2)]


def test_a_closure_that_kills_workers_is_quarantined_and_its_innocent_neighbours_are_not(runtime: FakeRuntime) -> None:
    def kill(worker: int) -> None:
        runtime.kill(worker)
        runtime.restart(worker)

    with running_cluster(runtime, FOUR) as cluster:
        gate = behind_a_gate(cluster, runtime)
        first, guilty, third, fourth = schedule(cluster, [lambda _: 0, kill, lambda _: 2, lambda _: 3])
        gate.open()
        error = guilty.exception(LIMIT)
        assert isinstance(error, ClosureQuarantined)
        assert "attempt 3 on worker 0" in str(error)
        assert results([first, third, fourth]) == [0, 2, 3]
        assert runtime.fused_calls == [(0, 4)]
        with pytest.raises(ClosureQuarantined):
            cluster.join(LIMIT)


def test_a_transient_failure_has_each_closure_of_the_call_run_again_alone(runtime: FakeRuntime) -> None:
    refusals = iter([True])

    def refuse_once(_: int) -> int:
        if next(refusals, False):
            raise TransientError
        return 1

    with running_cluster(runtime, FOUR) as cluster:
        gate = behind_a_gate(cluster, runtime)
        futures = schedule(cluster, [lambda _: 0, refuse_once, lambda _: 2, lambda _: 3])
        gate.open()
        assert results(futures) == [0, 1, 2, 3]
        assert cluster.statistics().retried == 4
    assert runtime.fused_calls == [(0, 4)]


def test_one_cancelled_future_of_a_call_leaves_the_others_theirs(runtime: FakeRuntime) -> None:
    order: list[int] = []
    with running_cluster(runtime, FOUR) as cluster:
        gate, inner = behind_a_gate(cluster, runtime), Gate(runtime)
        futures = schedule(cluster, [inner, *[recorder(order, number) for number in range(1, 4)]])
        gate.open()
        inner.wait_arrived()
        assert futures[2].cancel()
        assert futures[2].cancelled()
        inner.open()
        assert results([futures[0], futures[1], futures[3]]) == [0, 1, 3]
        cluster.join(LIMIT)
        # It ran all the same.
        assert order == [1, 2, 3]
        assert (cluster.statistics().finished, cluster.statistics().cancelled) == (4, 1)


def test_a_call_of_which_all_futures_are_cancelled_is_cancelled(runtime: FakeRuntime) -> None:
    with running_cluster(runtime, FOUR) as cluster:
        gate, never = behind_a_gate(cluster, runtime), Gate(runtime)
        futures = schedule(cluster, [never] * 4)
        gate.open()
        never.wait_arrived()
        assert all(future.cancel() for future in futures)
        cluster.join(LIMIT)


def test_a_recovery_hands_a_whole_call_back_and_it_is_run_again(runtime: FakeRuntime) -> None:
    with running_cluster(runtime, FOUR) as cluster:
        gate, inner = behind_a_gate(cluster, runtime), Gate(runtime)
        futures = schedule(cluster, [inner] * 4)
        gate.open()
        inner.wait_arrived()
        cluster._queue.hold("a test holds it")
        assert cluster._queue.wait_quiet(LIMIT)
        assert cluster.statistics().waiting == 4
        inner.open()
        cluster._queue.release()
        assert results(futures) == [0] * 4


def test_a_removed_worker_hands_a_whole_call_back() -> None:
    runtime = FakeRuntime(2)
    with running_cluster(runtime, FOUR) as cluster:
        gates = [behind_a_gate(cluster, runtime, worker) for worker in (0, 1)]
        never = Gate(runtime)
        waiting = [threading.Event() for _ in range(4)]

        def body(event: threading.Event) -> Callable[[int], int]:
            return lambda worker: never(worker) if worker == 0 else event.set() or worker

        futures = schedule(cluster, [body(event) for event in waiting])
        gates[0].open()
        never.wait_arrived()
        gates[1].open()
        cluster.remove_worker(0, timeout=0.01)
        assert results(futures) == [1] * 4


def test_closing_ends_a_whole_call(runtime: FakeRuntime) -> None:
    with running_cluster(runtime, FOUR) as cluster:
        gate, never = behind_a_gate(cluster, runtime), Gate(runtime)
        futures = schedule(cluster, [never] * 6)
        gate.open()
        never.wait_arrived()
    assert all(isinstance(future.exception(LIMIT), ClosureCancelledError) for future in futures)


def test_a_full_queue_has_room_for_as_many_as_were_taken(runtime: FakeRuntime) -> None:
    options = dataclasses.replace(FOUR, max_queued_closures=4)
    with running_cluster(runtime, options) as cluster:
        gate = behind_a_gate(cluster, runtime)
        futures = schedule(cluster, [lambda _: 1] * 4)
        more: list[Future] = []
        blocked = [threading.Thread(target=lambda: more.extend(schedule(cluster, [lambda _: 2]))) for _ in range(4)]
        for thread in blocked:
            thread.start()
        gate.open()
        for thread in blocked:
            thread.join(LIMIT)
        assert results(futures) == [1] * 4
        assert results(more) == [2] * 4


def test_a_call_keeps_nothing_of_its_closures_alive_when_it_is_over(runtime: FakeRuntime) -> None:
    with running_cluster(runtime, FOUR) as cluster:
        gate = behind_a_gate(cluster, runtime)
        futures = schedule(cluster, [lambda _: object() for _ in range(4)])
        closures = [closure for closure in cluster._queue._state.lines if isinstance(closure, Closure)]
        gate.open()
        cluster.join(LIMIT)
        results(futures)
        assert [closure.work for closure in closures] == [None] * 4
