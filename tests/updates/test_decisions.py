"""Tests that decisions have the same results for Python numbers, NumPy numbers, and tensors inside a function."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import decisions

INFINITY = 2**62

# Each decision, its arguments, and its result.
TABLE = [
    ("staleness", (7, 4), 3),
    ("staleness", (4, 4), 0),
    ("learning_rate_scale", (0,), 1.0),
    ("learning_rate_scale", (1,), 1.0),
    ("learning_rate_scale", (4,), 0.25),
    ("is_accepted", (5, 5, 1, 2), True),
    ("is_accepted", (5, 5, 2, 2), False),
    ("is_accepted", (6, 5, 0, 2), False),
    ("is_accepted", (5, 6, 0, 2), False),
    ("is_complete", (1, 2), False),
    ("is_complete", (2, 2), True),
    ("is_pull_due", (0, 3), True),
    ("is_pull_due", (2, 3), False),
    ("is_pull_due", (3, 3), True),
    ("is_pull_due", (1, 1), True),
    ("may_lead", (5, 3, 3), True),
    ("may_lead", (6, 3, 3), False),
    ("may_lead", (4, 3, 1), False),
    ("may_lead", (9, INFINITY, 1), True),
    ("may_lead", (0, INFINITY, 2**63 - 1), True),
    ("may_lead", (5, 5, 2**63 - 1), True),
    ("rejoined_clock", (2, 5), 5),
    ("rejoined_clock", (5, 2), 5),
    ("may_start", (3, 3, 1, 0), True),
    ("may_start", (4, 3, 1, 0), False),
    ("may_start", (5, 3, 1, 2), True),
    ("may_start", (6, 3, 1, 2), False),
    ("may_start", (7, 3, 2, 0), True),
    ("may_start", (8, 3, 2, 0), False),
    ("is_delay_over", (10, 7, 2), True),
    ("is_delay_over", (10, 8, 2), False),
    ("is_delay_over", (10.5, 10.0, 0.0), True),
    ("is_delay_over", (10.0, 10.0, 0.0), False),
    ("is_delay_over", (10.0, 0.0, float("inf")), False),
    ("is_average_due", (2.0, 2.0, 10, 10), True),
    ("is_average_due", (1.5, 2.0, 10, 10), False),
    ("is_average_due", (2.0, 2.0, 9, 10), False),
    ("is_average_due", (0.0, 0.0, 0, 0), True),
]
# How many of its last arguments are settings of the rule, which stay Python numbers in a graph.
SETTINGS = {
    "is_accepted": 1,
    "is_complete": 1,
    "is_pull_due": 1,
    "may_lead": 1,
    "may_start": 2,
}
WITHOUT_AUTOGRAPH = {"staleness", "is_complete", "is_pull_due", "is_delay_over", "may_lead", "may_start"}


def given_to(name, values, convert):
    settings = SETTINGS.get(name, 0)
    numbers = values[: len(values) - settings]
    return [*map(convert, numbers), *values[len(numbers) :]]


def numpy_number(value):
    return np.float64(value) if isinstance(value, float) else np.int64(value)


def tensor(value):
    return tf.constant(value, tf.float64 if isinstance(value, float) else tf.int64)


def kind_of(said):
    """Returns the kind of a number; NumPy's and Python's numbers are of the same kind."""
    return {"b": bool, "i": int, "f": float}[np.asarray(said).dtype.kind]


def test_each_decision_on_numbers_has_the_expected_result():
    for name, values, expected in TABLE:
        for convert in (lambda value: value, numpy_number):
            said = getattr(decisions, name)(*given_to(name, values, convert))
            assert (said, kind_of(said)) == (expected, type(expected)), (name, values)


@pytest.mark.parametrize("autograph", [True, False])
def test_each_decision_has_the_same_result_inside_a_function(autograph):
    """Some are made under a lock, in a graph to which AutoGraph may add nothing."""
    rows = [row for row in TABLE if autograph or row[0] in WITHOUT_AUTOGRAPH]

    @tf.function(autograph=autograph)
    def decide():
        return [getattr(decisions, name)(*given_to(name, values, tensor)) for name, values, _ in rows]

    for said, (name, values, expected) in zip(decide(), rows, strict=True):
        assert (said, kind_of(said)) == (expected, type(expected)), (name, values)


def test_every_decision_is_in_the_table_and_needs_no_library():
    assert {name for name in vars(decisions) if not name.startswith("__")} == {"Any", *(name for name, *_ in TABLE)}
