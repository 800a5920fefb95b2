"""Gradient descent, and steps that subtract one, so that values show the number of steps."""

import pytest
import tensorflow as tf

from tests.ps_strategy.every_worker import TIMEOUT


def descend(variable, gradient, rate):
    """An update function: gradient descent."""
    if isinstance(gradient, tf.IndexedSlices):
        variable.scatter_sub(tf.IndexedSlices(gradient.values * rate, gradient.indices))
    else:
        variable.assign_sub(gradient * rate)


def descending_step(rule, weights):
    """Returns a step that subtracts 1 from each weight, and returns the pulled version and the last weight before."""

    @tf.function
    def step():
        with rule.pull() as version:
            found = weights[-1].read_value()
        rule.push([tf.ones_like(weight) for weight in weights], version)
        return version, found

    return step


def value_of(variables):
    """Returns the only value of all elements of the variables."""
    found = {float(number) for variable in variables for number in variable.numpy().ravel()}
    assert len(found) == 1, found
    return found.pop()


def run(strategy, step, worker=None, *args):
    """Runs a step on a worker, or on any, and returns its result."""
    return strategy.schedule(step, args=args, worker=worker).result(TIMEOUT)


def mostly_long(values, *usual):
    """Returns pytest parameters, of which the default suite runs the usual ones and the long suite the others."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else [value]), marks=[pytest.mark.long] * (value not in usual))
        for value in values
    ]
