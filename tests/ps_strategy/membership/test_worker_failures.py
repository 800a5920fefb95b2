"""Workers die, freeze, come and go while functions run: each function has its result, on another worker."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import coordinator
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import on_every_worker, unhealthy
from tests.ps_strategy.failure_programs import changing_workers, frozen_workers
from tests.ps_strategy.gate import Gate

# Generous: a server that starts on a busy machine may need a minute.
TIMEOUT = 120.0
FUNCTIONS = 5_000


@pytest.fixture(autouse=True)
def restored_workers(request) -> Iterator[None]:
    """Waits after a test until every worker is up and connected."""
    yield
    if "strategy" in request.fixturenames:
        cluster, strategy = map(request.getfixturevalue, ("shared_cluster", "strategy"))
        for worker in strategy.cluster.workers:
            if not cluster.is_alive("worker", worker.index):
                cluster.restart("worker", worker.index)
        on_every_worker(strategy, where)


@tf.function
def where() -> Any:
    return coordinator.get_current_worker_index()


@pytest.fixture
def counter(strategy):
    with strategy.scope():
        return tf.Variable(0, dtype=tf.int64)


@pytest.fixture
def count(counter):
    """A function that counts its runs and returns where it ran."""

    @tf.function
    def count():
        counter.assign_add(1)
        return coordinator.get_current_worker_index()

    return count


def results(futures):
    return [int(future.result(TIMEOUT)) for future in futures]


# rows 73, 77, 79, 86, 89.
def test_the_same_worker_may_die_twice_in_a_row(shared_cluster, strategy, counter, count):
    on_every_worker(strategy, where)
    before, victim = strategy.cluster.statistics().workers[1], strategy.cluster.workers[1]
    ending, seen = threading.Event(), [0]

    def read() -> None:
        while not ending.wait(0.002):
            seen.append(int(counter.numpy()))

    reader = threading.Thread(target=read, name="reader")
    reader.start()
    try:
        for _ in range(2):
            shared_cluster.kill("worker", 1)
            assert unhealthy(strategy) == (victim.device,)
            assert strategy.cluster.workers[0].healthy()
            assert results([strategy.schedule(count) for _ in range(4)]) == [0] * 4
            shared_cluster.restart("worker", 1)
            wait_until(lambda: unhealthy(strategy) == ())  # though nothing is scheduled
    finally:
        ending.set()
        reader.join()
    assert counter.numpy() == 8
    assert seen == sorted(seen), "the reader saw every value in order, regardless of the worker"
    after = strategy.cluster.statistics().workers[1]
    assert (after.losses - before.losses, after.reconnections - before.reconnections) == (2, 2)
    assert after.reconnecting_seconds > before.reconnecting_seconds


def test_a_function_whose_worker_is_killed_runs_again_elsewhere(shared_cluster, strategy, counter, count):  # row 74
    before = strategy.cluster.statistics().workers
    gate = Gate(strategy)
    [held] = gate.occupy()
    victim = gate.worker
    done_before = [strategy.schedule(count) for _ in range(10)]
    assert results(done_before) == [1 - victim] * 10

    shared_cluster.kill("worker", victim)
    wait_until(lambda: strategy.cluster.workers[victim].state.value == "lost")
    again = [strategy.schedule(count) for _ in range(10)]
    gate.open()
    strategy.join(TIMEOUT)

    assert held.result() >= 0
    assert gate.worker == 1 - victim
    # Earlier results are still available (row 24), and no call on the other worker failed.
    assert results([*done_before, *again]) == [1 - victim] * 20
    assert counter.numpy() == 20
    for old, new in zip(before, strategy.cluster.statistics().workers, strict=True):
        expected = int(new.index == victim)
        assert (new.losses - old.losses, new.retried - old.retried) == (expected, expected), new.device


# rows 76, 82, 83.
def test_work_waits_for_the_only_worker_and_resumes_when_it_returns(shared_cluster, strategy, counter, count):
    gate = Gate(strategy)
    held = gate.occupy(2)
    futures = [strategy.schedule(count) for _ in range(FUNCTIONS)]
    for index in (0, 1):
        shared_cluster.kill("worker", index)
    wait_until(lambda: [worker.state.value for worker in strategy.cluster.workers] == ["lost", "lost"])
    with pytest.raises(TimeoutError, match=f"{FUNCTIONS + 2} closures wait, running: nothing"):
        strategy.join(timeout=0.2)
    assert not any(future.done() for future in [*held, *futures])
    gate.open()
    shared_cluster.restart("worker", 1)
    strategy.join(TIMEOUT)
    assert results(futures) == [1] * FUNCTIONS
    assert counter.numpy() == FUNCTIONS
    assert all(future.result() >= 0 for future in held)
    assert unhealthy(strategy) == (strategy.cluster.workers[0].device,)


# rows 68, 69, 70.
def test_a_worker_that_died_while_iterators_were_made_has_all_again(shared_cluster, strategy):
    with strategy.scope():
        runs = tf.Variable(0, per_worker_variable=True)
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(tf.range(3, dtype=tf.int64), tf.constant(["a", "b", "c"])), "?"
        )
    ready = tf.data.Dataset.from_tensor_slices([7, 8]).repeat()

    @tf.function
    def step(first, second):
        element = next(first)
        return runs.assign_add(1), element, next(second), table.lookup(element % 3)

    def iterators():
        return (
            iter(strategy.experimental_distribute_datasets_from_function(lambda _: tf.data.Dataset.range(1_000))),
            iter(strategy.experimental_distribute_dataset(ready)),
        )

    made = [iterators()]
    on_every_worker(strategy, step, *made[0])
    killer = threading.Thread(target=shared_cluster.kill, args=("worker", 1), name="killer")
    killer.start()
    futures = []
    while killer.is_alive() or len(made) < 3:
        made.append(iterators())
        futures = [strategy.schedule(step, args=pair) for pair in made[-2:] for _ in range(3)]
    killer.join()
    strategy.join(TIMEOUT)
    assert all(future.exception() is None for future in futures)

    shared_cluster.restart("worker", 1)
    for number, pair in enumerate((made[0], made[-1])):
        found = strategy.schedule(step, args=pair, worker=1).result(TIMEOUT)
        assert found == (number + 1, 0, 7, b"a"), "each begins again, its variable with the first run"


def test_a_worker_is_killed_while_a_function_raises(shared_cluster, strategy, counter, count):  # rows 75, 80
    endless = Gate(strategy)
    [running] = endless.occupy()
    failing = Gate(strategy, failure="a mistake of the user")
    failing.occupy()
    shared_cluster.kill("worker", endless.worker)
    failing.open()
    with pytest.raises(tf.errors.InvalidArgumentError, match="a mistake of the user"):
        strategy.join(TIMEOUT)
    assert isinstance(running.exception(timeout=0), coordinator.ClosureCancelledError)
    assert results([strategy.schedule(count) for _ in range(6)]) == [failing.worker] * 6
    assert counter.numpy() == 6


@tf.function
def deadly(x: tf.Tensor) -> tf.Tensor:
    """Aborts the process that it runs in."""
    with tf.control_dependencies([tf.raw_ops.Abort(error_msg="a deadly function")]):
        return tf.identity(x)


@pytest.mark.long
def test_a_function_that_kills_its_workers_is_quarantined(shared_cluster, strategy):  # row 78
    future = strategy.schedule(deadly, args=(tf.constant(1),))

    def is_over() -> bool:
        for index in (0, 1):
            if not shared_cluster.is_alive("worker", index):
                shared_cluster.restart("worker", index)
        return future.done()

    wait_until(is_over, limit=TIMEOUT)
    error = future.exception(TIMEOUT)
    assert isinstance(error, coordinator.ClosureQuarantined), repr(error)
    assert str(error).count("worker lost") in (2, 3), error
    # The raw error distinguishes a lost worker from a lost parameter server.
    raw = error.original_exception
    assert isinstance(raw, tf.errors.UnavailableError | tf.errors.AbortedError), repr(raw)
    assert "/job:worker" in str(raw), raw
    assert "/job:ps" not in str(raw), raw
    with pytest.raises(coordinator.ClosureQuarantined):
        strategy.join(TIMEOUT)
    assert strategy.schedule(tf.function(lambda: tf.constant(1))).result(TIMEOUT) == 1


@pytest.mark.cluster
@pytest.mark.long
def test_functions_of_a_frozen_worker_run_elsewhere_and_no_other_worker_pauses(run_program):
    run_program(Path(frozen_workers.__file__).read_text(), timeout=280)


@pytest.mark.cluster
@pytest.mark.long
def test_workers_come_go_and_move_while_the_client_trains(run_program):  # row 87
    run_program(Path(changing_workers.__file__).read_text(), timeout=280)
