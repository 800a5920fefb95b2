"""Gradient descent, and steps that subtract one, so that their number shows in what they read and leave."""

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
    """A step that takes 1 from each weight; gives the version that it pulled, and the last weight that it found."""

    @tf.function
    def step():
        with rule.pull() as version:
            found = weights[-1].read_value()
        rule.push([tf.ones_like(weight) for weight in weights], version)
        return version, found

    return step


def value_of(variables):
    """What is in them, which is to be one number."""
    found = {float(number) for variable in variables for number in variable.numpy().ravel()}
    assert len(found) == 1, found
    return found.pop()


def run(strategy, step, worker=None, *args):
    """What a step gives on a worker, or on any."""
    return strategy.schedule(step, args=args, worker=worker).result(TIMEOUT)


def mostly_long(values, *usual):
    """Returns pytest parameters, of which the default suite runs the usual ones and the long suite the others."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else [value]), marks=[pytest.mark.long] * (value not in usual))
        for value in values
    ]
