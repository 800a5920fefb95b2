"""Rules of delayed gradients on two variables, and steps that push a number."""

import tensorflow as tf

from coordinator.updates import Delayed
from tests.updates import descent
from tests.updates.parts_of_rules import log_of


def make_rule(strategy, variables, delay, update=descent.descend):
    """Returns a rule that subtracts the pushed gradients."""
    return descent.new_rule(strategy, Delayed, variables, update, delay=delay)


def new_step(strategy, rule, variables):
    """Returns a step that pushes a number for each variable, and returns the pulled version and the value before."""

    @tf.function
    def step(value):
        with rule.pull() as version:
            found = variables[-1].read_value()[0, 0]
        rule.push([tf.fill(variable.shape, value) for variable in variables], version)
        return version, found

    def run(value, worker=0):
        results = descent.run(strategy, step, worker, tf.constant(float(value)))
        return tuple(float(number) for number in results)

    return run


def entries(rule):
    """Returns the entries of the queued pushes, those that are due first."""
    return log_of(rule).entries().numpy()
