"""Tests that the statistics of a rule agree with counts by hand, also after a checkpoint."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import RuleStatistics, Staleness
from coordinator.updates.rule_state import MAX_STALENESS
from tests.updates.descent import new_rule, pushing_step, run

ONES = [tf.ones([3]), tf.ones([4, 2])]


def test_measures_of_a_histogram_are_those_of_the_sorted_list():
    for histogram, mean, median, p99, greatest in (
        ((), 0, 0, 0, 0),
        ((0,), 0, 0, 0, 0),
        ((1, 1), 0.5, 0, 1, 1),
        ((99, 0, 1), 0.02, 0, 0, 2),
        ((98, 1, 1), 0.03, 0, 1, 2),
        ((1, 0, 0, 1, 0, 1), 8 / 3, 3, 5, 5),
    ):
        staleness = Staleness(histogram)
        assert (staleness.count, staleness.mean) == (sum(histogram), pytest.approx(mean))
        assert (staleness.median, staleness.p99, staleness.max) == (median, p99, greatest), histogram
    values = sorted(np.repeat(np.arange(5), (7, 0, 30, 21, 42)))
    for percent in (0.5, 1, 10, 29, 50, 57, 90, 99, 100):
        expected = next(value for place, value in enumerate(values, 1) if place * 100 >= percent * 100)
        assert Staleness((7, 0, 30, 21, 42)).percentile(percent) == expected, percent


@pytest.fixture
def rule(strategy, variables):
    return new_rule(strategy, "asynchronous", variables)


def test_pushes_pulls_bytes_clocks_and_staleness_are_counted(strategy, rule):
    assert rule.statistics() == RuleStatistics(0, 0, 0, 0, 0, 0, 0, Staleness((0,)), {}, {})
    assert "workers idle never" in str(rule.statistics())

    @tf.function(autograph=False)
    def step(behind):
        with rule.pull() as version:
            pass
        return rule.push(ONES, version - behind)

    for worker, behind in ((1, 2), (1, 5), (1, 0), (1, 0), (0, 0)):
        run(strategy, step, worker, tf.constant(behind, tf.int64))
    statistics = rule.statistics()
    assert (statistics.updates, statistics.pushes, statistics.rejected, statistics.pulls) == (5, 5, 0, 5)
    assert statistics.bytes_pulled == 5 * 4 * (3 + 8)
    # To the home the learning rate, the version, the worker's index and whether all is finite; to the other server a
    # learning rate.
    assert statistics.bytes_pushed == 5 * (4 * (3 + 8) + 4 + 8 + 8 + 8 + 4)
    assert statistics.staleness.histogram == (3, 0, 1, 0, 0, 1)
    assert statistics.clocks == {0: 1, 1: 4}
    assert statistics.idle_shares == {0: 0.0, 1: 0.0}
    run(strategy, step, 0, tf.constant(10 * MAX_STALENESS, tf.int64))
    assert rule.statistics().staleness.max == MAX_STALENESS


def test_summaries_can_be_read_back(tmp_path):
    statistics = RuleStatistics(3, 4, 1, 3, 100, 200, 0, Staleness((2, 0, 0, 1)), {1: 3}, {1: 0.25})
    with tf.summary.create_file_writer(str(tmp_path)).as_default() as writer:
        statistics.write_summaries(step=7, prefix="mine")
        writer.close()
    [path] = tmp_path.iterdir()
    events = [event for event in tf.compat.v1.train.summary_iterator(str(path)) if event.summary.value]
    assert {event.step for event in events} == {7}
    found = {value.tag: tf.make_ndarray(value.tensor) for event in events for value in event.summary.value}
    assert found.pop("mine/staleness")[:, 2].sum() == 3
    expected = {"updates": 3, "pushes": 4, "rejected": 1, "pulls": 3, "bytes_pulled": 100, "bytes_pushed": 200}
    expected |= {"not_finite": 0, "idle_share/worker_1": 0.25}
    expected |= {
        f"staleness/{name}": value for name, value in zip(("mean", "median", "p99", "max"), (1, 0, 3, 3), strict=True)
    }
    assert found == {f"mine/{name}": value for name, value in expected.items()}


def test_a_checkpoint_has_version_clocks_and_counts_with_which_a_rule_continues(strategy, variables, tmp_path):
    rule, again = (new_rule(strategy, "asynchronous", variables) for _ in range(2))

    def train(step, steps):
        for _ in range(steps):
            strategy.schedule(step, worker=0)
        strategy.join()

    checkpoint, step = tf.train.Checkpoint(rule=rule), pushing_step(rule, ONES)
    train(step, 7)
    saved, path = rule.statistics(), checkpoint.save(str(tmp_path / "model"))
    assert (saved.updates, saved.pushes, saved.pulls, sum(saved.clocks.values())) == (7, 7, 7, 7)
    # No second model and no steps in flight.
    keys = {key.split("/.ATTRIBUTES")[0] for key, _ in tf.train.list_variables(path)}
    names = ("version", "counts", "clocks", "seconds")
    assert keys == {"_CHECKPOINTABLE_OBJECT_GRAPH", "save_counter", *(f"rule/state/{name}" for name in names)}
    train(step, 5)
    assert rule.statistics().updates == 12
    checkpoint.restore(path).assert_consumed()
    assert rule.statistics() == saved
    tf.train.Checkpoint(rule=again).restore(path).assert_consumed()
    train(pushing_step(again, ONES), 2)
    assert int(again.version) == 9
