"""Real workers are killed and return: no scheduled function is lost, and other workers are unaffected.

which workers die    when                      what the caller sees
one                  between two calls         every function runs exactly once
one                  while it runs a function  that function alone runs again, on another worker
two at once          while both run one        the same; each comes back without the other
"""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf

import coordinator
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import unhealthy
from tests.ps_strategy.failure_programs import only_worker_losses, quarantined_client
from tests.ps_strategy.gate import Gate

# Generous: a server that starts on a busy machine may need a minute.
TIMEOUT = 120.0


@pytest.fixture(autouse=True)
def restored_workers(shared_cluster, strategy) -> Iterator[None]:
    """Waits after a test until every worker is up and connected."""
    yield
    dead = [worker.index for worker in strategy.cluster.workers if not shared_cluster.is_alive("worker", worker.index)]
    bring_back(shared_cluster, strategy, dead)


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


@tf.function
def where():
    return coordinator.get_current_worker_index()


def bring_back(cluster, strategy, indices):
    """Starts workers again, all at once, and returns when the strategy uses every worker."""
    for index in indices:
        cluster.restart("worker", index, wait=False)
    for index in indices:
        cluster.wait_ready("worker", index)
    wait_used(strategy, {worker.index for worker in strategy.cluster.workers})


def wait_used(strategy, indices):
    """Schedules until each of the workers has run something."""
    used = set()

    def schedule():
        futures = [strategy.schedule(where) for _ in strategy.cluster.workers]
        strategy.join(TIMEOUT)
        used.update(int(future.result()) for future in futures)
        return used >= indices

    wait_until(schedule)


def worker_statistics(strategy, index):
    return strategy.cluster.statistics().workers[index]


def names(strategy, indices):
    return tuple(strategy.cluster.workers[index].device for index in sorted(indices))


def test_a_worker_killed_between_two_calls_repeats_no_function(
    shared_cluster, strategy, counter, count
):  # rows 73, 86, 89
    wait_used(strategy, {0, 1, 2})
    before = worker_statistics(strategy, 1)
    shared_cluster.kill("worker", 1)
    assert unhealthy(strategy) == names(strategy, {1})
    futures = [strategy.schedule(count) for _ in range(4)]
    strategy.join(TIMEOUT)
    assert counter.numpy() == 4
    assert {int(future.result()) for future in futures} <= {0, 2}
    assert strategy.cluster.workers[0].healthy()
    assert not strategy.cluster.workers[1].healthy()

    shared_cluster.restart("worker", 1)
    wait_until(lambda: unhealthy(strategy) == ())  # though nothing is scheduled
    after = worker_statistics(strategy, 1)
    assert (after.losses - before.losses, after.reconnections - before.reconnections) == (1, 1)
    assert 0 < after.reconnecting_seconds - before.reconnecting_seconds < TIMEOUT


def test_a_function_whose_worker_is_killed_runs_again_elsewhere(shared_cluster, strategy, counter, count):  # row 74
    before = strategy.cluster.statistics().workers
    gate = Gate(strategy)
    [held] = gate.occupy()
    victim = gate.worker
    done_before = [strategy.schedule(count) for _ in range(10)]
    results = [int(future.result(TIMEOUT)) for future in done_before]  # the other two continue

    shared_cluster.kill("worker", victim)
    wait_until(lambda: worker_statistics(strategy, victim).state == "lost")
    again = [strategy.schedule(count) for _ in range(10)]
    gate.open()
    strategy.join(TIMEOUT)

    assert held.result() >= 0
    assert gate.worker != victim
    assert victim not in {int(future.result()) for future in again}
    assert counter.numpy() == 20
    # Earlier results are still available (row 24), and no call on the other workers failed.
    assert [int(future.result(timeout=0)) for future in done_before] == results
    for old, new in zip(before, strategy.cluster.statistics().workers, strict=True):
        expected = int(new.index == victim)
        assert (new.losses - old.losses, new.retried - old.retried) == (expected, expected), new.device


def test_two_workers_killed_together_return_independently(shared_cluster, strategy, counter, count):  # row 76
    gate = Gate(strategy)
    held = gate.occupy(3)
    shared_cluster.kill("worker", 0)
    shared_cluster.kill("worker", 2)
    wait_until(lambda: unhealthy(strategy) == names(strategy, {0, 2}))
    gate.open()
    futures = [strategy.schedule(count) for _ in range(20)]
    strategy.join(TIMEOUT)
    assert {int(future.result()) for future in futures} == {1}
    assert all(future.result() >= 0 for future in held)

    shared_cluster.restart("worker", 2)
    wait_used(strategy, {1, 2})
    assert unhealthy(strategy) == names(strategy, {0})
    bring_back(shared_cluster, strategy, [0])
    assert unhealthy(strategy) == ()
    assert counter.numpy() == 20


def test_a_returning_worker_has_its_tables_variables_and_iterators_again(shared_cluster, strategy):  # row 70
    with strategy.scope():
        runs = tf.Variable(0, per_worker_variable=True)
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(tf.range(3, dtype=tf.int64), tf.constant(["a", "b", "c"])), "?"
        )
    from_function = iter(strategy.experimental_distribute_datasets_from_function(endless_range))
    from_dataset = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices([7, 8]).repeat()))

    @tf.function
    def step(first, second):
        element = next(first)
        return {
            "worker": coordinator.get_current_worker_index(),
            "run": runs.assign_add(1),
            "inputs": (element, next(second)),
            "word": table.lookup(element % 3),
        }

    def run_on_all(workers):
        seen = []

        def has_run_everywhere():
            seen.extend(strategy.local_results([strategy.schedule(step, args=(from_function, from_dataset))]))
            return {int(result["worker"]) for result in seen} >= workers

        wait_until(has_run_everywhere)
        strategy.join(TIMEOUT)
        return seen

    run_on_all({0, 1, 2})
    shared_cluster.restart("worker", 1)
    first = next(result for result in run_on_all({0, 1, 2}) if result["worker"] == 1)
    assert first["run"] == 1
    assert first["inputs"] == (0, 7)
    assert first["word"] == b"a"


@pytest.mark.parametrize("kind", ["dataset function", pytest.param("ready dataset", marks=pytest.mark.long)])
def test_a_worker_may_die_while_iterators_are_made(shared_cluster, strategy, counter, kind):  # rows 68, 69
    @tf.function
    def step(iterator):
        next(iterator)
        counter.assign_add(1)
        return coordinator.get_current_worker_index()

    victim = 2
    killer = threading.Thread(target=shared_cluster.kill, args=("worker", victim), name="killer")
    killer.start()
    try:
        # The second worker dies while its iterators are created or read.
        iterators = []
        while killer.is_alive() or len(iterators) < 2:
            if kind == "dataset function":
                dataset = strategy.experimental_distribute_datasets_from_function(endless_range)
            else:
                dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(3).repeat())
            iterators.append(iter(dataset))
            futures = [strategy.schedule(step, args=(iterator,)) for iterator in iterators[-2:] for _ in range(3)]
    finally:
        killer.join()
    strategy.join(TIMEOUT)
    assert all(future.exception() is None for future in futures)

    bring_back(shared_cluster, strategy, [victim])
    used = set()

    def is_used_by_all():
        used.add(int(strategy.schedule(step, args=(iterators[0],)).result(TIMEOUT)))
        return used == {0, 1, 2}

    wait_until(is_used_by_all)


def test_the_same_worker_may_die_twice_in_a_row(shared_cluster, strategy, counter, count):  # rows 77, 79
    before = worker_statistics(strategy, 0)
    ending = threading.Event()
    seen = [0]

    def read() -> None:
        while not ending.wait(0.002):
            seen.append(int(counter.numpy()))

    reader = threading.Thread(target=read, name="reader")
    reader.start()
    try:
        for _ in range(2):
            shared_cluster.restart("worker", 0)
            futures = [strategy.schedule(count) for _ in range(5)]
            wait_used(strategy, {0})
    finally:
        ending.set()
        reader.join()
    assert all(future.done() for future in futures)
    assert counter.numpy() == 10
    assert seen == sorted(seen), "the reader saw every value in order, regardless of the worker"
    after = worker_statistics(strategy, 0)
    assert (after.losses - before.losses, after.reconnections - before.reconnections) == (2, 2)


def test_a_worker_is_killed_while_a_function_raises(shared_cluster, strategy, counter, count):  # rows 75, 80
    endless = Gate(strategy)
    [running] = endless.occupy()
    failing = Gate(strategy, failure="a mistake of the user")
    failing.occupy()
    victim = ({0, 1, 2} - {endless.worker, failing.worker}).pop()
    shared_cluster.kill("worker", victim)
    failing.open()
    with pytest.raises(tf.errors.InvalidArgumentError, match="a mistake of the user"):
        strategy.join(TIMEOUT)
    assert isinstance(running.exception(timeout=0), coordinator.ClosureCancelledError)
    for _ in range(6):
        strategy.schedule(count)
    strategy.join(TIMEOUT)
    assert counter.numpy() == 6


@pytest.mark.long
def test_thousands_of_functions_complete_although_a_worker_dies(shared_cluster, strategy, counter, count):
    total, before = 5_000, worker_statistics(strategy, 1)
    futures = [strategy.schedule(count) for _ in range(total)]
    futures[500].result(TIMEOUT)
    shared_cluster.restart("worker", 1, wait=False)
    strategy.join(2 * TIMEOUT)
    assert all(future.exception(timeout=0) is None for future in futures)
    retried = worker_statistics(strategy, 1).retried - before.retried
    # At least once: only functions that a dying worker had counted already may be counted again.
    assert total <= counter.numpy() <= total + retried
    shared_cluster.wait_ready("worker", 1)
    wait_used(strategy, {1})
    # All functions may have ended before the loss was noticed.
    assert worker_statistics(strategy, 1).losses - before.losses == 1


def endless_range(context):
    return tf.data.Dataset.range(1_000)


@pytest.mark.cluster
def test_work_waits_for_the_only_worker_and_resumes_when_it_returns(run_program):  # rows 82, 83
    run_program(Path(only_worker_losses.__file__).read_text(), 5_000, timeout=280)


@pytest.mark.long
def test_a_function_that_kills_its_workers_is_quarantined(shared_cluster, strategy, run_program):  # row 78
    run_program(Path(quarantined_client.__file__).read_text(), json.dumps(shared_cluster.spec))
    assert sum(shared_cluster.is_alive("worker", index) for index in (0, 1, 2)) == 1
