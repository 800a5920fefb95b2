"""Tests that the statistics of a rule agree with counts by hand."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import (
    Asynchronous,
    BoundedDelay,
    Delayed,
    ModelAverage,
    RuleStatistics,
    Staleness,
    StaleSynchronous,
    Synchronous,
)
from coordinator.updates.rule_state import LAST_SEEN, MAX_STALENESS, WAITED
from tests.ps_strategy.every_worker import on_every_worker
from tests.updates.descent import descend, mostly_long

TIMEOUT = 120.0
PUSHES = 45


@pytest.mark.parametrize(
    ("histogram", "mean", "median", "p99", "greatest"),
    [
        ((), 0, 0, 0, 0),
        ((0,), 0, 0, 0, 0),
        ((5,), 0, 0, 0, 0),
        ((0, 4), 1, 1, 1, 1),
        ((1, 1), 0.5, 0, 1, 1),
        ((1, 2), 2 / 3, 1, 1, 1),
        ((99, 0, 1), 0.02, 0, 0, 2),
        ((98, 1, 1), 0.03, 0, 1, 2),
        ((1, 0, 0, 1, 0, 1), 8 / 3, 3, 5, 5),
    ],
)
def test_measures_of_a_histogram(histogram, mean, median, p99, greatest):
    staleness = Staleness(histogram)
    assert staleness.count == sum(histogram)
    assert staleness.mean == pytest.approx(mean)
    assert (staleness.median, staleness.p99, staleness.max) == (median, p99, greatest)


@pytest.mark.parametrize("percent", [0.5, 1, 10, 29, 50, 57, 90, 99, 100])
def test_percentiles_are_those_of_the_sorted_list(percent):
    histogram = (7, 0, 30, 21, 42)
    values = sorted(np.repeat(np.arange(5), histogram))
    expected = next(value for place, value in enumerate(values, 1) if place * 100 >= percent * 100)
    assert Staleness(histogram).percentile(percent) == expected


@pytest.fixture
def rule(strategy):
    with strategy.scope():
        return Asynchronous(descend, [tf.Variable(tf.zeros([3])), tf.Variable(tf.zeros([5]))], learning_rate=0.1)


def step_of(rule, behind=0):
    @tf.function
    def step():
        with rule.pull() as version:
            gradients = [tf.ones([3]), tf.ones([5])]
        return rule.push(gradients, version - behind)

    return step


def test_an_unused_rule_has_empty_statistics(rule):
    assert rule.statistics() == RuleStatistics(0, 0, 0, 0, 0, 0, 0, Staleness((0,)), {}, {})
    assert "workers idle never" in str(rule.statistics())


def test_pushes_pulls_bytes_clocks_and_staleness_are_counted(strategy, rule):
    for behind in (0, 0, 2, 5):
        strategy.schedule(step_of(rule, behind), worker=1).result(TIMEOUT)
    strategy.schedule(step_of(rule), worker=0).result(TIMEOUT)
    statistics = rule.statistics()
    assert (statistics.updates, statistics.pushes, statistics.rejected, statistics.pulls) == (5, 5, 0, 5)
    assert statistics.bytes_pulled == 5 * 4 * (3 + 5)
    # To the home the learning rate, the version, the worker's index and whether all is finite; to the other server a
    # learning rate.
    assert statistics.bytes_pushed == 5 * (4 * (3 + 5) + 4 + 8 + 8 + 8 + 4)
    assert statistics.staleness.histogram == (3, 0, 1, 0, 0, 1)
    assert statistics.clocks == {0: 1, 1: 4}
    assert statistics.idle_shares == {0: 0.0, 1: 0.0}


def test_staleness_above_the_largest_slot_is_counted_in_it(strategy, rule):
    strategy.schedule(step_of(rule, 10 * MAX_STALENESS)).result(TIMEOUT)
    assert rule.statistics().staleness.max == MAX_STALENESS


def test_each_worker_has_a_clock(strategy, rule):
    on_every_worker(strategy, step_of(rule))
    on_every_worker(strategy, step_of(rule))
    assert rule.statistics().clocks == {0: 2, 1: 2, 2: 2}


def test_idle_shares_are_waiting_time_divided_by_total_time(strategy, rule):
    on_every_worker(strategy, step_of(rule))
    seconds = rule.state.seconds.numpy()
    seconds[:3] = [[100, 110, 5], [100, 100, 0], [100, 104, 9]]
    seconds[3:] = 0
    rule.state.seconds.assign(seconds)
    assert seconds[0, LAST_SEEN] == 110
    assert seconds[0, WAITED] == 5
    assert rule.statistics().idle_shares == {0: 0.5, 1: 0.0, 2: 1.0}


def test_summaries_of_a_long_training_take_no_more_memory(tmp_path):
    counts = {"pushes": 10**15, "rejected": 0, "pulls": 10**15, "bytes_pulled": 2**60, "bytes_pushed": 2**60}
    staleness = Staleness((9 * 10**14, 10**14, 7))
    statistics = RuleStatistics(10**15, **counts, not_finite=0, staleness=staleness, clocks={}, idle_shares={})
    with tf.summary.create_file_writer(str(tmp_path)).as_default() as writer:
        statistics.write_summaries(step=2**40)
        writer.close()
    [path] = tmp_path.iterdir()
    events = list(tf.compat.v1.train.summary_iterator(str(path)))
    written = {value.tag: tf.make_ndarray(value.tensor) for event in events for value in event.summary.value}
    assert written["updates/bytes_pulled"] == 2**60
    histogram = written["updates/staleness"][:, 2]
    assert (histogram[0], histogram[-1]) == (90_000, 1)
    assert histogram.sum() == 100_001


def test_summaries_can_be_read_back(strategy, rule, tmp_path):
    for behind in (0, 0, 3):
        strategy.schedule(step_of(rule, behind), worker=2).result(TIMEOUT)
    statistics = rule.statistics()
    with tf.summary.create_file_writer(str(tmp_path)).as_default() as writer:
        statistics.write_summaries(step=7, prefix="mine")
        writer.close()
    [path] = tmp_path.iterdir()
    written = {}
    for event in tf.compat.v1.train.summary_iterator(str(path)):
        for value in event.summary.value:
            assert event.step == 7
            written[value.tag] = tf.make_ndarray(value.tensor)
    expected = {
        "updates": 3,
        "pushes": 3,
        "rejected": 0,
        "pulls": 3,
        "bytes_pulled": statistics.bytes_pulled,
        "bytes_pushed": statistics.bytes_pushed,
        "not_finite": 0,
        "staleness/mean": 1.0,
        "staleness/median": 0,
        "staleness/p99": 3,
        "staleness/max": 3,
        "idle_share/worker_2": 0.0,
    }
    for name, value in expected.items():
        assert written[f"mine/{name}"] == value
    assert written["mine/staleness"][:, 2].sum() == 3
    assert len(written) == len(expected) + 1


def test_statistics_have_a_readable_text():
    staleness = Staleness((2, 0, 2))
    statistics = RuleStatistics(3, 4, 1, 5, 2_000_000, 1_500_000, 0, staleness, {0: 4}, {0: 0.25, 1: 0.5})
    assert str(staleness) == "staleness mean 1.00, median 0, p99 2, max 2"
    assert str(statistics) == (
        "3 updates, 1 of 4 gradients rejected, staleness mean 1.00, median 0, p99 2, max 2; 5 pulls; 2.0 MB pulled, "
        "1.5 MB pushed; workers idle 25%, 50%"
    )


RULES = {
    "asynchronous": lambda variables: Asynchronous(descend, variables, learning_rate=0.1),
    "unlocked": lambda variables: Asynchronous(descend, variables, use_locking=False, learning_rate=0.1),
    "stale synchronous": lambda variables: StaleSynchronous(
        descend, variables, get_model_frequency=2, learning_rate=0.1
    ),
    "synchronous": lambda variables: Synchronous(descend, variables, grads_to_wait=2, learning_rate=0.1),
    "bounded delay": lambda variables: BoundedDelay(descend, variables, max_delay=4, learning_rate=0.1),
    "delayed": lambda variables: Delayed(descend, variables, delay=0.0, learning_rate=0.1),
    "model average": lambda variables: ModelAverage(descend, variables, learning_rate=0.1),
}


@pytest.mark.parametrize("name", mostly_long(RULES, "asynchronous"))
@pytest.mark.long
def test_statistics_agree_with_each_other_while_workers_push(strategy, name):
    with strategy.scope():
        rule = RULES[name]([tf.Variable(tf.zeros([3])), tf.Variable(tf.zeros([5]))])
    step, found = step_of(rule), []
    futures = [strategy.schedule(step) for _ in range(PUSHES)]
    while not all(future.done() for future in futures):
        found.append(rule.statistics())
    found.append(rule.statistics())
    for statistics in found:
        applied = statistics.updates if name == "delayed" else statistics.pushes
        assert statistics.staleness.count == applied, statistics
        if name != "model average":
            assert sum(statistics.clocks.values()) == statistics.pushes - statistics.rejected, statistics
        assert statistics.updates <= statistics.pushes - statistics.rejected
    assert sum(found[-1].clocks.values()) == PUSHES - found[-1].rejected


@pytest.mark.long
def test_clocks_do_not_count_steps_that_a_worker_skipped(strategy):
    with strategy.scope():
        rule = StaleSynchronous(
            descend,
            [tf.Variable(tf.zeros([3])), tf.Variable(tf.zeros([5]))],
            get_model_frequency=2,
            max_lead=1,
            learning_rate=0.1,
        )
    state, step = rule.state, step_of(rule)
    strategy.schedule(step, worker=0).result(TIMEOUT)
    # From then on the client does not change the state of worker 0.
    strategy.settled(TIMEOUT)
    assert not state.workers.is_active.numpy()[0]
    state.clocks.scatter_nd_update([[0]], tf.constant([7], tf.int64))
    state.workers.is_active.scatter_nd_update([[0]], [True])
    strategy.schedule(step, worker=1).result(TIMEOUT)
    assert state.clocks.numpy()[1] == 8
    assert rule.statistics().clocks == {0: 1, 1: 1}
