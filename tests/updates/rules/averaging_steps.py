"""Steps for the tests of model averaging."""

import tensorflow as tf

from coordinator.updates import ModelAverage
from coordinator.updates.rule_state import pause
from tests.updates import descent
from tests.updates.parts_of_rules import own_model_of

# So long that no test sees a second averaging, in seconds.
NEVER = 1e6
# How often a worker polls before it gives up; each poll takes ten milliseconds at least.
MAX_POLLS = 3_000


def make_rule(strategy, variables, **options):
    return descent.new_rule(strategy, ModelAverage, variables, **options)


def ascent(rule, weights):
    """Returns a step that adds a number to each weight, and returns the value before."""

    @tf.function
    def step(by):
        with rule.pull() as version:
            found = weights[1].read_value()
        rule.push([-by * tf.ones_like(weight) for weight in weights], version)
        return found

    return step


def run(strategy, step, worker, by=1.0):
    return float(descent.run(strategy, step, worker, tf.constant(by)))


def own_models(rule):
    """Returns each worker's present value of the second weight."""
    return [float(value) for value in own_model_of(rule).variables[1].read_all()]


def poll_until(is_true):
    """Waits on the worker, and returns the number of polls, at most MAX_POLLS. To be called in a scheduled function."""

    def poll_again(polls):
        with tf.control_dependencies([pause(tf.constant(1e-2, tf.float64))]):
            return polls + 1

    return tf.while_loop(lambda polls: (polls < MAX_POLLS) & ~is_true(), poll_again, [tf.constant(0)])[0]
