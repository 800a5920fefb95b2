"""Tests of the queue of delayed gradients: pushes of every kind, and its checkpoints."""

import math

import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import Delayed
from tests.updates.descent import new_rule, run
from tests.updates.parts_of_rules import model_of
from tests.updates.rules.delayed_steps import entries, make_rule

NEVER = math.inf


@pytest.fixture
def mixed(strategy):
    """A dense variable and two tables, of which one is declared."""
    with strategy.scope():
        return [tf.Variable(lambda: tf.zeros([3])), *(tf.Variable(lambda: tf.zeros([5, 2])) for _ in range(2))]


def push_of_kinds(strategy, rule):
    """Schedules a push of a number: of rows that are given, as whole gradients, or for the first variable alone."""
    dense, rows, table = model_of(rule).variables

    @tf.function(reduce_retracing=True)
    def sparse(value, indices):
        with rule.pull() as version:
            looked_up = tf.nn.embedding_lookup(rows.read_value(), indices)
        slices = tf.IndexedSlices(tf.fill([tf.size(indices), 2], value) + 0 * looked_up, indices)
        return rule.push([None, slices, slices], version)

    @tf.function
    def whole(value):
        with rule.pull() as version:
            pass
        return rule.push([tf.fill(variable.shape, value) for variable in (dense, rows, table)], version)

    @tf.function
    def first(value):
        with rule.pull() as version:
            pass
        return rule.push([tf.fill([3], value), None, None], version)

    kinds = {"whole": whole, "first": first}

    def push(kind, value):
        more = () if isinstance(kind, str) else (tf.constant(kind),)
        function = kinds[kind] if isinstance(kind, str) else sparse
        assert run(strategy, function, 0, tf.constant(value), *more)

    return push


PUSHES = [([0, 3], 1.0), ("whole", 2.0), ([3, 3, 1], 4.0), ("first", 8.0), ([2], 16.0)]
MIXED_EXPECTED = [
    np.full([3], -10.0),
    *[np.repeat([[-3.0], [-6.0], [-18.0], [-11.0], [-2.0]], 2, axis=1)] * 2,
]


def assert_mixed(variables):
    for variable, expected in zip(variables, MIXED_EXPECTED, strict=True):
        np.testing.assert_array_equal(variable.numpy(), expected)


@pytest.mark.long
def test_pushes_of_any_kind_are_in_a_checkpoint_with_delays_and_order(strategy, mixed, tmp_path):
    with strategy.scope():
        delay = tf.Variable(NEVER, dtype=tf.float64, trainable=False)
    rule, again = (
        new_rule(strategy, Delayed, mixed, delay=lambda worker, time: delay.read_value(), embeddings=[mixed[1]])
        for _ in range(2)
    )
    push = push_of_kinds(strategy, rule)
    for kind, value in PUSHES[:4]:
        push(kind, value)
    delay.assign(0.0)
    push(*PUSHES[4])
    saved_entries = entries(rule)
    path = tf.train.Checkpoint(rule=rule, model=mixed).save(str(tmp_path / "model"))
    assert "rule/state/queued" in {key.split("/.ATTR")[0] for key, _ in tf.train.list_variables(path)}
    saved = rule.statistics()

    # Another program's rule, with a queued push that is not in the checkpoint.
    push_again = push_of_kinds(strategy, again)
    delay.assign(NEVER)
    push_again("whole", 1000.0)
    tf.train.Checkpoint(rule=again, model=mixed).restore(path).assert_consumed()
    assert again.statistics() == saved
    np.testing.assert_array_equal(entries(again)[:, 3:], saved_entries[:, 3:])
    # The pull of this push applies the one that was due.
    push_again("first", 0.0)
    assert again.version.numpy() == 1
    np.testing.assert_array_equal(mixed[1].numpy()[:, 0], [0, 0, -16, 0, 0])
    assert again.flush() == 5
    assert_mixed(mixed)


def test_a_checkpoint_for_other_variables_is_refused(strategy, mixed, tmp_path):
    rule, other = make_rule(strategy, mixed[:2], 0), make_rule(strategy, mixed, 0)
    path = tf.train.Checkpoint(rule=rule).write(str(tmp_path / "rule"))
    with pytest.raises(ValueError, match="saved by a rule for other variables"):
        tf.train.Checkpoint(rule=other).read(path)
