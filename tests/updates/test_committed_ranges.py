"""Tests of rules that commit each range of epochs once, whatever happens to the functions and workers that push it."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from coordinator.data import Epochs, arrays
from coordinator.data.ledger import WINDOW
from coordinator.data.ranges import PositionRange
from coordinator.ps_strategy.fusing.repeated_function import may_be_fused
from coordinator.updates import Delayed, Synchronous
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import concrete_function
from tests.updates.descent import TIMEOUT, descend, mostly_long, new_rule, run, value_of
from tests.updates.parts_of_rules import committed_of

SIZE = 10**6


@pytest.fixture
def epochs():
    return Epochs(arrays(np.arange(SIZE)), 1)


@pytest.fixture
def make_rule(strategy, variables, epochs):
    """Creates a rule that subtracts 1 with each push."""
    return lambda kind, once=epochs, **settings: new_rule(strategy, kind, variables, once=once, **settings)


def step_of(rule, variables):
    """Returns a step that pushes ones for a range."""

    @tf.function
    def step(positions):
        gradients = [tf.ones_like(variable) for variable in variables]
        return rule.run(lambda: (tf.constant(0), gradients), positions=positions)

    return step


@pytest.fixture
def push_with(strategy, variables):
    """Returns a function that pushes ones for the range of a number."""

    def pushing(rule):
        step = step_of(rule, variables)
        return lambda number: run(strategy, step, 0, positions_of(number))

    return pushing


def positions_of(number):
    return np.array([0, number, 1, number, 0], np.int64).view(PositionRange)


@pytest.mark.parametrize("name", mostly_long(["asynchronous", "synchronous", "stale synchronous"], "asynchronous"))
def test_a_range_that_is_pushed_again_changes_nothing(name, make_rule, push_with, variables):
    rule = make_rule(name)
    push = push_with(rule)
    for number in (0, 1, 0, 5, 5, 1, WINDOW + 1, 1):
        push(number)
    assert value_of(variables) == -4.0
    assert int(rule.version) == 4
    statistics = rule.statistics()
    assert (statistics.updates, statistics.pushes, statistics.rejected) == (4, 8, 4)


def test_a_checkpoint_has_the_ranges_whose_gradients_it_has(strategy, variables, epochs, make_rule, tmp_path):
    rule = make_rule(Synchronous, grads_to_wait=2)

    @tf.function
    def step(positions):
        with rule.pull() as version:
            gradients = [tf.ones_like(variable) for variable in variables]
        return rule.push(gradients, version, positions=positions)

    checkpoint = tf.train.Checkpoint(rule=rule, epochs=epochs, first=variables[0], second=variables[1])
    handed_out = epochs.on(strategy)
    for _ in range(3):
        strategy.schedule(step, (next(handed_out),), worker=0).result(TIMEOUT)
    # Two are in an update, one waits.
    with strategy.quiet():
        path = checkpoint.save(str(tmp_path / "saved"))
    assert epochs.statistics().done == 3
    handed_out.close()
    rule.flush()
    checkpoint.restore(path).assert_consumed()
    assert epochs.statistics().done == 2
    assert committed_of(rule) == [0, 1]
    assert [int(positions[3]) for positions, _ in zip(epochs.on(strategy), range(2), strict=False)] == [2, 3]
    for number in (2, 1, 5):
        assert run(strategy, step, 0, positions_of(number))
    assert value_of(variables) == -2.0

    # Without the epochs, which begin again, the ranges are not refused.
    tf.train.Checkpoint(rule=rule).restore(path).expect_partial()
    assert committed_of(rule) == [0, 1]
    epochs.on(strategy)
    assert committed_of(rule) == []


@pytest.mark.long
def test_the_record_goes_on_when_the_rule_is_switched(strategy, make_rule, push_with, variables, epochs):
    first, second = make_rule("asynchronous"), make_rule("bounded delay", max_delay=None)
    push = push_with(first)
    push(0)
    with pytest.raises(ValueError, match="the same once="):
        first.switch_to(make_rule("asynchronous", once=None))
    first.switch_to(second)
    for number in (0, 1, 0, 1):
        push(number)
    assert value_of(variables) == -2.0
    second.switch_to(make_rule("stale synchronous"))
    for number in (0, 1, 2):
        push(number)
    assert value_of(variables) == -3.0
    with strategy.quiet():
        assert committed_of(first) == [0, 1, 2]
        assert '"below": 0' in epochs.serialize()


def test_what_a_rule_with_once_needs_is_said_in_words(strategy, make_rule, variables, epochs):
    rule, plain = make_rule("asynchronous"), make_rule("asynchronous", once=None)
    ones = [tf.ones_like(variable) for variable in variables]

    def step(pushed, times=1, **given):
        for _ in range(times):
            with pushed.pull() as version:
                pushed.push(ones, version, **given)

    for pushed, given, error, message in (
        (rule, {}, ValueError, "push needs the range"),
        (rule, {"positions": tf.constant([1, 2], tf.int64)}, TypeError, "the vector that epochs.on"),
        (rule, {"positions": positions_of(1), "times": 2}, ValueError, "several times for one range"),
        (plain, {"positions": positions_of(1)}, ValueError, "created with once=epochs"),
    ):
        with pytest.raises(error, match=message):
            strategy.schedule(tf.function(lambda pushed=pushed, given=given: step(pushed, **given)))
    with pytest.raises(TypeError, match=r"coordinator\.data\.Epochs"):
        make_rule("asynchronous", once=arrays(np.arange(3)))
    with pytest.raises(ValueError, match="cannot be combined with once="):
        make_rule("asynchronous", lr_staleness_modulation=True)
    with strategy.scope(), pytest.raises(TypeError, match="once"):
        Delayed(descend, variables, learning_rate=1.0, delay=0, once=epochs)


@pytest.mark.long
def test_ranges_in_fused_calls_of_a_killed_worker_count_once(strategy, shared_cluster, make_rule, variables):
    epochs, finished = Epochs(arrays(np.arange(400)), 2), []
    rule = make_rule("asynchronous", epochs)
    step, ranges = step_of(rule, variables), epochs.on(strategy)
    for positions in itertools.islice(ranges, 150):
        if not finished:
            assert may_be_fused(concrete_function(strategy, step, positions))
        strategy.schedule(step, (positions,)).add_done_callback(finished.append)
    wait_until(lambda: len(finished) > 10)
    shared_cluster.kill("worker", 1)
    shared_cluster.restart("worker", 1)
    for positions in ranges:
        strategy.schedule(step, (positions,))
    strategy.join(TIMEOUT)
    # On both servers.
    assert value_of(variables) == -200
    assert int(rule.version) == 200
