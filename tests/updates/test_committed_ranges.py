"""Tests of rules that commit each range of epochs once: on servers that live, with pushes of workers that died."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.data import Epochs, arrays
from coordinator.data.ledger import WINDOW
from coordinator.data.ranges import PositionRange
from coordinator.updates import Asynchronous, BoundedDelay, Delayed, StaleSynchronous, Synchronous
from tests.updates.descent import descend, mostly_long, value_of
from tests.updates.parts_of_rules import committed_of, log_of, stores_of
from tests.updates.state.unfinished_pushes import add, ids

TIMEOUT = 120
SIZE = 10**6

RULES = {
    "asynchronous": Asynchronous,
    "synchronous": lambda *args, **settings: Synchronous(*args, grads_to_wait=1, **settings),
    "bounded delay": lambda *args, **settings: BoundedDelay(*args, max_delay=None, **settings),
    "stale": lambda *args, **settings: StaleSynchronous(*args, get_model_frequency=1, max_lead=3, **settings),
}


@pytest.fixture
def epochs():
    return Epochs(arrays(np.arange(SIZE)), 1)


@pytest.fixture
def make_rule(strategy, variables, epochs):
    """Creates a rule that subtracts 1 with each push."""

    def make(name, once=epochs):
        with strategy.scope():
            return RULES[name](descend, variables, learning_rate=1.0, once=once)

    return make


@pytest.fixture
def push_with(strategy, variables):
    """Returns a function that pushes ones for the range of a number, and returns whether they were accepted."""

    def pushing(rule):
        @tf.function
        def step(positions):
            gradients = [tf.ones_like(variable) for variable in variables]
            return rule.run(lambda: (tf.constant(0), gradients), positions=positions)

        return lambda number: strategy.schedule(step, (positions_of(number),)).result(TIMEOUT)

    return pushing


def positions_of(number):
    return np.array([0, number, 1, number, 0], np.int64).view(PositionRange)


@pytest.mark.parametrize("name", mostly_long(RULES, "asynchronous"))
def test_a_range_that_is_pushed_again_changes_nothing(name, make_rule, push_with, variables):
    rule = make_rule(name)
    push = push_with(rule)
    for number in (0, 1, 0, 5, 5, 1, WINDOW + 1, 1):
        push(number)
    assert value_of(variables) == -4.0
    assert int(rule.version) == 4
    statistics = rule.statistics()
    assert (statistics.updates, statistics.pushes, statistics.rejected) == (4, 8, 4)


@pytest.mark.long
def test_a_repeated_push_finishes_the_update_of_a_dead_worker(make_rule, push_with, variables):
    rule = make_rule("bounded delay")
    push = push_with(rule)
    push(0)
    for store in stores_of(rule):
        add(rule, store, ids(1)[0], 3.0)

    @tf.function
    def commit():
        with tf.device(rule.state.home):
            zero, number = tf.constant(0, tf.int64), tf.constant(7, tf.int64)
            rule.state.workers.pulled_version.scatter_nd_update([[900 + 1]], [0])
            return log_of(rule).add(tf.identity(ids(1)[0]), zero, zero, zero, tf.identity(number))

    accepted, _, update = commit()
    assert accepted
    stores_of(rule)[0].use_once(update)
    push(7)
    assert value_of(variables) == -4.0
    assert rule.version.numpy() == 2
    # What was refused is on no server.
    for store in stores_of(rule):
        rows = tf.unstack(store.lists.read_value())[-1]
        assert int(tf.raw_ops.TensorListLength(input_handle=rows)) == 0


def test_a_checkpoint_has_the_ranges_whose_gradients_it_has(strategy, variables, epochs, tmp_path):
    with strategy.scope():
        rule = Synchronous(descend, variables, grads_to_wait=2, learning_rate=1.0, once=epochs)

    @tf.function
    def step(positions):
        with rule.pull() as version:
            gradients = [tf.ones_like(variable) for variable in variables]
        return rule.push(gradients, version, positions=positions)

    def push(number):
        assert strategy.schedule(step, (positions_of(number),)).result(TIMEOUT)

    checkpoint = tf.train.Checkpoint(rule=rule, epochs=epochs, first=variables[0], second=variables[1])
    handed_out = epochs.on(strategy)
    for _ in range(3):
        strategy.schedule(step, (next(handed_out),)).result(TIMEOUT)
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
    push(2)
    push(1)
    push(5)
    assert value_of(variables) == -2.0

    # Without the epochs, which begin again, the ranges are not refused.
    tf.train.Checkpoint(rule=rule).restore(path).expect_partial()
    assert committed_of(rule) == [0, 1]
    epochs.on(strategy)
    assert committed_of(rule) == []


@pytest.mark.long
def test_the_record_goes_on_when_the_rule_is_switched(strategy, make_rule, push_with, variables, epochs):
    first, second = make_rule("asynchronous"), make_rule("bounded delay")
    push = push_with(first)
    push(0)
    with pytest.raises(ValueError, match="the same once="):
        first.switch_to(make_rule("asynchronous", once=None))
    first.switch_to(second)
    for number in (0, 1, 0, 1):
        push(number)
    assert value_of(variables) == -2.0
    second.switch_to(make_rule("stale"))
    for number in (0, 1, 2):
        push(number)
    assert value_of(variables) == -3.0
    with strategy.quiet():
        assert committed_of(first) == [0, 1, 2]
        assert '"below": 0' in epochs.serialize()


def test_what_a_rule_with_once_needs_is_said_in_words(strategy, make_rule, variables, epochs):
    rule, plain = make_rule("asynchronous"), make_rule("asynchronous", once=None)
    ones = [tf.ones_like(variable) for variable in variables]
    cases = [
        (rule, {}, ValueError, "push needs the range"),
        (rule, {"positions": tf.constant([1, 2], tf.int64)}, TypeError, "the vector that epochs.on"),
        (plain, {"positions": positions_of(1)}, ValueError, "created with once=epochs"),
    ]
    for pushed, given, error, message in cases:

        @tf.function
        def step(pushed=pushed, given=given):
            with pushed.pull() as version:
                return pushed.push(ones, version, **given)

        with pytest.raises(error, match=message):
            strategy.schedule(step)

    @tf.function
    def loop(positions):
        for _ in tf.range(2):
            with rule.pull() as version:
                rule.push(ones, version, positions=positions)

    with pytest.raises(ValueError, match="several times for one range"):
        strategy.schedule(loop, (positions_of(1),))
    with pytest.raises(TypeError, match=r"coordinator\.data\.Epochs"):
        make_rule("asynchronous", once=arrays(np.arange(3)))
    with strategy.scope(), pytest.raises(ValueError, match="cannot be combined with once="):
        Asynchronous(descend, variables, learning_rate=1.0, once=epochs, lr_staleness_modulation=True)
    with strategy.scope(), pytest.raises(TypeError, match="once"):
        Delayed(descend, variables, learning_rate=1.0, delay=0, once=epochs)
