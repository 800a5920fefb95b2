"""Tests of which closures run in one call, how many, and what happens to them when the call fails or is cancelled.

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
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from coordinator.errors import ClosureCancelledError, ClosureQuarantined, ParameterServerLost
from coordinator.runtime import FusionKey
from coordinator.testing.fake_runtime import EndOfDataError, FakeRuntime, Gate
from coordinator.workers.fusion_size import FusionSizeModel
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS, fail, index_of, running_scheduler
from tests.workers.fusible_steps import FOUR, SAME_KEY, FiniteData, behind_a_gate, recorder, results, schedule


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime(1)


def test_adjacent_closures_run_in_one_call_in_order_each_with_its_own_result(runtime: FakeRuntime) -> None:
    order: list[int] = []
    with running_scheduler(runtime, FOUR) as scheduler:
        gate, inner = behind_a_gate(scheduler), Gate(runtime)
        futures = schedule(scheduler, [inner, *(recorder(order, number) for number in range(1, 10))])
        gate.open()
        inner.wait_arrived()
        assert [future.running() for future in futures] == [True] * 4 + [False] * 6
        assert (scheduler.cluster.statistics().running, scheduler.cluster.statistics().waiting) == (4, 6)
        inner.open()
        assert results(futures) == [0, *order] == list(range(10))
        scheduler.join(LIMIT)
        assert runtime.fused_calls == [(0, 4), (0, 4), (0, 2)]
        assert scheduler.cluster.statistics().finished == 11
        assert scheduler.cluster.statistics().workers[0].finished == 11


@pytest.mark.parametrize(("most", "sizes"), [(1, []), (3, [3, 3]), (100, [4, 2])])
def test_the_maximal_number_of_fused_steps_is_an_option(runtime: FakeRuntime, most: int, sizes: list[int]) -> None:
    options = dataclasses.replace(OPTIONS, steps_per_dispatch=most)
    with running_scheduler(runtime, options) as scheduler:
        gate = behind_a_gate(scheduler)
        futures = schedule(scheduler, [lambda _: None] * 6)
        gate.open()
        results(futures)
    assert [size for _, size in runtime.fused_calls] == sizes


def test_a_worker_asks_for_a_larger_call_and_makes_it_once_it_is_ready(runtime: FakeRuntime) -> None:
    runtime.prepared = {}
    with running_scheduler(runtime) as scheduler:

        def run_many(count: int = 64, **settings: Any) -> None:
            gate = behind_a_gate(scheduler)
            futures = schedule(scheduler, [index_of] * count, **settings)
            gate.open()
            results(futures)

        while not runtime.requested:
            run_many()
        assert set(runtime.requested) == {(0, 4)}
        assert not runtime.fused_calls
        runtime.prepared = {0: {4}}
        run_many()
        assert set(runtime.fused_calls) == {(0, 4)}
        # Of many runs of one closure too.
        runtime.fused_calls.clear()
        run_many(1, steps=64)
        assert set(runtime.fused_calls) == {(0, 4)}
        # A larger size is asked for when it would pay: mostly the next one, 16.
        while max(runtime.requested) == (0, 4):
            run_many()


def test_no_worker_takes_more_than_its_share_of_the_waiting_closures() -> None:
    runtime = FakeRuntime(2)
    with running_scheduler(runtime, dataclasses.replace(OPTIONS, steps_per_dispatch=64)) as scheduler:
        gates = [behind_a_gate(scheduler, worker) for worker in (0, 1)]
        inner = Gate(runtime)
        futures = schedule(scheduler, [inner] * 10)
        gates[0].open()
        inner.wait_arrived()
        assert scheduler.cluster.statistics().waiting == 6
        gates[1].open()
        inner.open()
        assert len(results(futures)) == 10
    assert runtime.fused_calls[0] == (0, 4)


def test_closures_of_different_kinds_run_in_separate_calls_in_order(runtime: FakeRuntime) -> None:
    order: list[int] = []
    keys = [FusionKey("a", ()), FusionKey("a", ()), FusionKey("b", ()), FusionKey("b", 1), None, None]
    with running_scheduler(runtime, FOUR) as scheduler:
        gate = behind_a_gate(scheduler)
        futures = [scheduler.schedule(recorder(order, each), "step", fusion_key=key) for each, key in enumerate(keys)]
        gate.open()
        results(futures)
    assert order == list(range(6))
    assert runtime.fused_calls == [(0, 2)]


@pytest.mark.parametrize(
    ("limits", "settings"),
    [({}, {"worker": 0}), ({}, {"timeout": LIMIT}), ({"max_attempts": 1}, {}), ({"transient_retries": 0}, {})],
)
def test_what_is_for_one_worker_has_a_time_limit_or_may_not_be_repeated_runs_alone(
    runtime: FakeRuntime, limits: dict[str, Any], settings: dict[str, Any]
) -> None:
    with running_scheduler(runtime, dataclasses.replace(FOUR, **limits)) as scheduler:
        gate = behind_a_gate(scheduler)
        futures = schedule(scheduler, [lambda _: 1] * 4, **settings)
        gate.open()
        assert results(futures) == [1] * 4
    assert runtime.fused_calls == []


def test_a_call_keeps_nothing_of_its_closures_alive_when_it_is_over(runtime: FakeRuntime) -> None:
    with running_scheduler(runtime, FOUR) as scheduler:
        gate = behind_a_gate(scheduler)
        steps: list[Callable[[int], object]] = [lambda _, number=number: [number] for number in range(4)]  # type: ignore[misc]
        ended = [weakref.ref(step) for step in steps]
        futures = [scheduler.schedule(step, "step", fusion_key=SAME_KEY) for step in steps]
        del steps
        gate.open()
        scheduler.join(LIMIT)
        results(futures)
        # The worker's thread may still hold its last call.
        wait_until(lambda: [step() for step in ended] == [None] * 4)


def test_a_call_takes_no_more_elements_than_its_worker_has_left() -> None:
    runtime, data = FakeRuntime(1), FiniteData(range(10))
    with running_scheduler(runtime, FOUR) as scheduler:
        gate = behind_a_gate(scheduler)
        futures = [data.schedule(scheduler) for _ in range(13)]
        gate.open()
        assert results(futures[:10]) == list(range(10))
        assert all(isinstance(future.exception(LIMIT), EndOfDataError) for future in futures[10:])
        with pytest.raises(EndOfDataError):
            scheduler.join(LIMIT)
    assert runtime.fused_calls == [(0, 4), (0, 4), (0, 2)]


def test_a_shared_call_overtakes_no_other_closure() -> None:
    runtime, data = FakeRuntime(2), FiniteData([], range(9))
    order: list[int] = []
    with running_scheduler(runtime, FOUR) as scheduler:
        gate = behind_a_gate(scheduler, 1)
        data.schedule(scheduler).add_done_callback(lambda _: order.append(0))
        wait_until(lambda: scheduler.queue.statistics().retried)
        closing = behind_a_gate(scheduler, 0)
        data.schedule(scheduler).add_done_callback(lambda _: order.append(1))
        scheduler.schedule(lambda _: order.append(2), "other")
        for _ in range(4):
            data.schedule(scheduler).add_done_callback(lambda _: order.append(3))
        gate.open()
        wait_until(lambda: len(order) == 7)
        closing.open()
        scheduler.join(LIMIT)
    assert order == sorted(order)
    assert runtime.fused_calls


# Endings


def test_an_error_fails_its_closure_and_the_others_have_results(
    runtime: FakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    order: list[int] = []
    caplog.set_level(logging.INFO, logger="coordinator")
    with running_scheduler(runtime, dataclasses.replace(FOUR, stop_on_error=False)) as scheduler:
        gate = behind_a_gate(scheduler)
        bodies = [recorder(order, 0), recorder(order, 1), fail, index_of]
        first, second, third, fourth = schedule(scheduler, bodies)
        gate.open()
        error = third.exception(LIMIT)
        assert results([first, second, fourth]) == [0, 1, 0]
        assert isinstance(error, ZeroDivisionError)
        assert len(error.__notes__) == 1
        # The first two ran before the error, and again after it.
        assert order == [0, 1, 0, 1]
        assert runtime.fused_calls == [(0, 4)]
        assert "4 calls of step in one failed and are run again, each alone" in caplog.text
        statistics = scheduler.cluster.statistics()
        assert (statistics.finished, statistics.failed, statistics.retried) == (4, 1, 4)


def test_a_lost_workers_closures_are_requeued_in_order_and_then_run_alone(runtime: FakeRuntime) -> None:
    order: list[int] = []
    with running_scheduler(runtime, FOUR) as scheduler:
        gate, inner = behind_a_gate(scheduler), Gate(runtime)
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
        gate = behind_a_gate(scheduler)
        first, failing, third, fourth = schedule(scheduler, [lambda _: 0, kill, lambda _: 2, lambda _: 3])
        gate.open()
        error = failing.exception(LIMIT)
        assert isinstance(error, ClosureQuarantined)
        assert "attempt 3 on worker 0" in str(error)
        assert results([first, third, fourth]) == [0, 2, 3]
        assert runtime.fused_calls == [(0, 4)]
        with pytest.raises(ClosureQuarantined):
            scheduler.join(LIMIT)


def test_a_call_is_cancelled_when_all_of_its_futures_are(runtime: FakeRuntime) -> None:
    with running_scheduler(runtime, FOUR) as scheduler:
        for count in (1, 4):
            order: list[int] = []
            gate, inner = behind_a_gate(scheduler), Gate(runtime)
            futures = schedule(scheduler, [inner, *[recorder(order, number) for number in range(1, 4)]])
            gate.open()
            inner.wait_arrived()
            for future in futures[-count:]:
                assert future.cancel()
                assert future.cancelled()
            if count == 1:
                inner.open()
                assert results(futures[:3]) == [0, 1, 2]
            scheduler.join(LIMIT)
            # The cancelled one of several ran nevertheless.
            assert order == ([1, 2, 3] if count == 1 else [])
        assert (scheduler.cluster.statistics().finished, scheduler.cluster.statistics().cancelled) == (5, 5)


def test_a_lost_parameter_server_is_reported_although_the_worker_dies_as_well(runtime: FakeRuntime) -> None:
    # No other thread notices it meanwhile.
    with running_scheduler(runtime, dataclasses.replace(FOUR, heartbeat_interval=LIMIT)) as scheduler:
        gate = behind_a_gate(scheduler)

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
        gates, never = [behind_a_gate(scheduler, worker) for worker in (0, 1)], Gate(runtime)
        futures = schedule(scheduler, [lambda worker: worker or never(worker)] * 4)
        gates[0].open()
        never.wait_arrived()
        gates[1].open()
        scheduler.cluster.remove_worker(0, timeout=0.01)
        assert results(futures) == [1] * 4


# Sizes


ENOUGH = 10_000


def train(model: FusionSizeModel, overhead: float, each: float, calls: int, tracing: float = 0.0) -> list[int]:
    """Runs calls that take `overhead + steps * each` seconds, the first of each size `steps * tracing` more."""
    sizes: list[int] = []
    for _ in range(calls):
        steps = model.steps("step", ENOUGH)
        model.record("step", steps, overhead + steps * (each if steps in sizes else each + tracing))
        sizes.append(steps)
    return sizes


def test_short_steps_are_fused_until_the_call_takes_a_fortieth_of_the_time() -> None:
    assert FusionSizeModel(None).steps("step", ENOUGH) == 1
    # Up to a limit, in few sizes; long steps run alone, and no call takes more than some tenths of a second.
    assert set(train(FusionSizeModel(None), 1e-3, 1e-6, 2000)) == {1, 4, 16, 64, 256}
    assert set(train(FusionSizeModel(None), 1e-3, 0.1, 100)) == {1}
    assert 0.02 + max(train(FusionSizeModel(None), 0.02, 0.02, 200)) * 0.02 <= 0.4
    overhead, each = 1e-3, 1e-3
    size = max(train(FusionSizeModel(None), overhead, each, 200))
    assert overhead / (overhead + size * each) <= 1 / 40
    assert overhead / (overhead + size / 2 * each) > 1 / 40


def test_a_size_is_not_traced_before_it_would_have_saved_much_of_its_tracing_time() -> None:
    overhead, each, tracing = 1e-3, 2e-3, 0.1
    sizes = train(FusionSizeModel(None), overhead, each, 100, tracing)
    first = next(number for number, size in enumerate(sizes) if size > 1)
    assert 4 * first * (overhead + each) >= sizes[first] * tracing / 2
    assert max(train(FusionSizeModel(None), overhead, each, 2000, tracing)) > max(sizes)


def test_the_size_adapts_to_longer_and_shorter_steps() -> None:
    model = FusionSizeModel(None)
    train(model, 1e-3, 1e-4, 500)
    assert train(model, 1e-3, 0.1, 500)[-40:].count(1) > 30
    assert train(model, 1e-3, 1e-4, 2000)[-20:].count(1) < 5


def test_a_function_that_failed_in_a_fused_call_runs_alone_from_then_on() -> None:
    for model in (FusionSizeModel(None), FusionSizeModel(8)):
        train(model, 1e-3, 1e-4, 100)
        model.record_error("step")
        assert model.steps("step", ENOUGH) == 1
        assert FusionSizeModel(8).steps("other", ENOUGH) == 8


def test_a_size_is_run_only_when_it_is_ready() -> None:
    model = FusionSizeModel(None)
    for _ in range(100):
        assert model.steps("step", ENOUGH, {}) == 1
        model.record("step", 1, 1e-3)
    assert model.wanted("step", ENOUGH) == 4
    assert model.steps("step", ENOUGH, {4: 0.1}) == 4
    # Of what is ready the largest that is not larger than wanted.
    assert model.steps("step", ENOUGH, {2: 0.1, 3: 0.1, 16: 0.1}) == 3
    assert model.steps("step", 2, {4: 0.1}) == 1


def test_a_larger_size_is_wanted_once_it_would_have_saved_what_the_last_one_cost() -> None:
    quick, slow = FusionSizeModel(None), FusionSizeModel(None)
    for model, seconds in ((quick, 0.001), (slow, 1000.0)):
        train(model, 1e-3, 1e-6, 2)
        for _ in range(200):
            model.record("step", model.steps("step", ENOUGH, {4: seconds}), 1e-3)
            model.note_ready("step", {4: seconds})
    assert quick.wanted("step", ENOUGH) == 16
    assert slow.wanted("step", ENOUGH) == 4


def test_a_restarted_worker_wants_what_is_known_after_its_first_call() -> None:
    model = FusionSizeModel(None)
    train(model, 1e-3, 1e-6, 1000)
    model.restart()
    assert train(model, 1e-3, 1e-6, 2, tracing=1.0) == [1, 256]
    # The first call in a process of the worker, which takes longer, is not counted.
    assert [model.steps("step", available) for available in (ENOUGH, 63, 3, 1)] == [256, 16, 1, 1]


def test_a_worker_goes_beyond_its_share_for_as_long_as_another_call_takes() -> None:
    model = FusionSizeModel(None)
    assert model.beyond_share("step") == 0
    train(model, 1e-2, 1e-3, 500)
    assert 8 <= model.beyond_share("step") <= 11
    train(model, 1e-3, 0.1, 500)
    assert model.beyond_share("step") == 0
    assert FusionSizeModel(8).beyond_share("step") == 0
