"""Tests that decisions have the same results for Python numbers and for tensors inside a function."""

import math

import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import decisions

INFINITY = 2**62
LONGEST = 2**63 - 1

# Each decision, how many of its last arguments are settings of the rule, which stay Python numbers in a graph, and
# its results.
TABLE = {
    "staleness": (0, {(7, 4): 3, (4, 4): 0}),
    "learning_rate_scale": (0, {(0,): 1.0, (1,): 1.0, (4,): 0.25}),
    "is_accepted": (1, {(5, 5, 1, 2): True, (5, 5, 2, 2): False, (6, 5, 0, 2): False, (5, 6, 0, 2): False}),
    "is_complete": (1, {(1, 2): False, (2, 2): True}),
    "is_pull_due": (1, {(0, 3): True, (2, 3): False, (3, 3): True, (1, 1): True}),
    "may_lead": (
        1,
        {(5, 3, 3): True, (6, 3, 3): False, (4, 3, 1): False, (9, INFINITY, 1): True}
        | {(0, INFINITY, LONGEST): True, (5, 5, LONGEST): True},
    ),
    "rejoined_clock": (0, {(2, 5): 5, (5, 2): 5}),
    "may_start": (
        2,
        {(3, 3, 1, 0): True, (4, 3, 1, 0): False, (5, 3, 1, 2): True}
        | {(6, 3, 1, 2): False, (7, 3, 2, 0): True, (8, 3, 2, 0): False},
    ),
    "is_delay_over": (
        0,
        {(10, 7, 2): True, (10, 8, 2): False, (10.5, 10.0, 0.0): True}
        | {(10.0, 10.0, 0.0): False, (10.0, 0.0, math.inf): False},
    ),
    "is_average_due": (
        0,
        {(2.0, 2.0, 10, 10): True, (1.5, 2.0, 10, 10): False, (2.0, 2.0, 9, 10): False, (0.0, 0.0, 0, 0): True},
    ),
}
WITHOUT_AUTOGRAPH = {"staleness", "is_complete", "is_pull_due", "is_delay_over", "may_lead", "may_start"}


def decided(names, convert):
    """Returns what the decisions say, and what is expected."""
    said, expected = [], []
    for name in names:
        settings, results = TABLE[name]
        for values, result in results.items():
            count = len(values) - settings
            said.append(getattr(decisions, name)(*map(convert, values[:count]), *values[count:]))
            expected.append((name, values, result))
    return said, expected


def tensor(value):
    return tf.constant(value, tf.float64 if isinstance(value, float) else tf.int64)


@pytest.mark.parametrize("autograph", [True, False])
def test_each_decision_has_the_same_result_on_numbers_and_inside_a_function(autograph):
    # Some are made under a lock, in a graph to which AutoGraph may add nothing.
    names = TABLE if autograph else WITHOUT_AUTOGRAPH

    @tf.function(autograph=autograph)
    def decide():
        return decided(names, tensor)[0]

    on_numbers, expected = decided(names, lambda value: value)
    for said in (on_numbers, decide()):
        for found, (name, values, result) in zip(said, expected, strict=True):
            assert (found, np.asarray(found).dtype.kind) == (result, np.asarray(result).dtype.kind), (name, values)
