"""What a rule keeps on its home server, and how it is counted."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates.state.rule_state import COUNTS, LARGEST_STALENESS, NOBODY, Ledger
from tests.ps_strategy.every_worker import on_every_worker

TIMEOUT = 120.0


@pytest.fixture
def ledger(strategy):
    with strategy.scope():
        return Ledger()


def result(strategy, step):
    return strategy.schedule(step).result(TIMEOUT)


def test_all_of_it_is_on_one_server(ledger):
    variables = [*ledger.variables, *vars(ledger.present).values()]
    assert {variable.device for variable in variables} == {ledger.home}
    assert len(variables) == 8


def test_ledgers_have_locks_of_their_own(strategy, ledger):
    with strategy.scope():
        other = Ledger()
    assert other.number != ledger.number

    @tf.function(autograph=False)
    def both():
        with ledger.lock.hold():
            one = ledger.version.assign_add(1)
        with other.lock.hold([one]):
            return one + other.version.read_value()

    assert result(strategy, both) == 1


def test_who_is_under_way_is_in_no_checkpoint(ledger, tmp_path):
    path = tf.train.Checkpoint(ledger=ledger).write(str(tmp_path / "ledger"))
    saved = {name.split("/")[1] for name, _ in tf.train.list_variables(path) if name.startswith("ledger/")}
    assert saved == {"version", "counts", "clocks", "seconds"}


def test_what_happened_is_counted_by_name(strategy, ledger):
    @tf.function(autograph=False)
    def step():
        ledger.count(pulls=1, bytes_pulled=tf.constant(2**40, tf.int64))
        ledger.count(rejected=tf.constant(True), updates=2)

    for _ in range(3):
        result(strategy, step)
    expected = {"pulls": 3, "bytes_pulled": 3 * 2**40, "rejected": 3, "updates": 6}
    assert ledger.snapshot().counts == {name: expected.get(name, 0) for name in COUNTS}


def test_racing_workers_lose_no_count(strategy, ledger):
    step = tf.function(lambda: ledger.count(pushes=1), autograph=False)
    for future in [strategy.schedule(step) for _ in range(60)]:
        future.result(TIMEOUT)
    assert ledger.snapshot().counts["pushes"] == 60


def test_staleness_has_its_slot_and_the_last_one_takes_the_rest(strategy, ledger):
    @tf.function(autograph=False)
    def step():
        for staleness in (0, 3, 3, LARGEST_STALENESS, LARGEST_STALENESS + 1, 2**40, -1):
            ledger.count(staleness=tf.constant(staleness, tf.int64))

    result(strategy, step)
    histogram = ledger.snapshot().histogram
    assert {int(slot): int(histogram[slot]) for slot in histogram.nonzero()[0]} == {0: 2, 3: 2, LARGEST_STALENESS: 3}


def test_steps_and_looks_are_noted_for_their_worker(strategy, ledger):
    @tf.function(autograph=False)
    def step():
        with ledger.lock.hold():
            ledger.note_step(strategy.worker_index())
        with ledger.lock.hold():
            ledger.note_seen(strategy.worker_index(), waited=1.5)

    for _ in range(2):
        on_every_worker(strategy, step)
    assert ledger.clocks.numpy()[:4].tolist() == [2, 2, 2, 0]
    first, last, waited = ledger.seconds.numpy()[:3].T
    assert np.all(first > 0)
    assert np.all(last > first)
    assert waited.tolist() == [3.0, 3.0, 3.0]
    assert not ledger.seconds.numpy()[3:].any()


def test_the_slowest_clock_is_that_of_the_others_who_are_active(strategy, ledger):
    @tf.function(autograph=False)
    def slowest():
        with ledger.lock.hold():
            return [ledger.slowest_clock(besides=tf.constant(worker, tf.int64)) for worker in range(3)]

    assert result(strategy, slowest) == [NOBODY] * 3

    def with_rows(variable, rows):
        indices = [[number] for number in range(len(rows))]
        variable.assign(tf.tensor_scatter_nd_update(variable, indices, tf.constant(rows, variable.dtype)))

    with_rows(ledger.clocks, [5, 3, 1])
    with_rows(ledger.present.is_active, [True, True, False])
    assert result(strategy, slowest) == [3, 5, 3]
