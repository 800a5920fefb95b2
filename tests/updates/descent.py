"""Rules of gradient descent with a rate of 1, and steps that push, so that values show the number of steps."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import Asynchronous, BoundedDelay, Delayed, ModelAverage, StaleSynchronous, Synchronous
from coordinator.updates.rule_state import NO_STEP, pause
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import TIMEOUT

RULES = {
    "asynchronous": Asynchronous,
    "synchronous": partial(Synchronous, grads_to_wait=1),
    "stale synchronous": partial(StaleSynchronous, get_model_frequency=1, max_lead=3),
    "bounded delay": partial(BoundedDelay, max_delay=0),
    "delayed": partial(Delayed, delay=0.0),
    "model average": ModelAverage,
}


def descend(variable, gradient, rate):
    """An update function: gradient descent."""
    rate = tf.cast(rate, variable.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        variable.scatter_sub(tf.IndexedSlices(gradient.values * rate, gradient.indices))
    else:
        variable.assign_sub(gradient * rate)


def new_rule(strategy, kind, variables, optimizer=descend, **settings):
    """Returns a rule: of a name in `RULES`, or of a class."""
    with strategy.scope():
        if callable(optimizer):
            settings = {"learning_rate": 1.0} | settings
        return RULES.get(kind, kind)(optimizer, variables, **settings)


def pushing_step(rule, gradients, behind=0):
    """Returns a step that pushes gradients, and returns whether they were accepted.

    Args:
      rule: whose step it is.
      gradients: given, or a function of the step's arguments that returns them.
      behind: how much older the version is that it gives than the one that it has pulled.
    """

    @tf.function(autograph=False)
    def step(*args):
        with rule.pull() as version:
            given = gradients(*args) if callable(gradients) else gradients
        return rule.push(given, version - behind)

    return step


def descending_step(rule, weights):
    """Returns a step that subtracts 1 from each weight, and returns the pulled version and the last weight before."""

    @tf.function(autograph=False)
    def step():
        with rule.pull() as version:
            found = weights[-1].read_value()
        rule.push([tf.ones_like(weight) for weight in weights], version)
        return version, found

    return step


HELD, FREE = tf.constant(True), tf.constant(False)


def gated_step(rule, variables, may_end):
    """Returns a step that pushes ones: at once if it is called with `FREE`, else when `may_end` is true."""

    @tf.function
    def step(is_held):
        with rule.pull() as version:
            with tf.control_dependencies([version]):
                polls = tf.constant(0)
            while is_held and not may_end:
                with tf.control_dependencies([pause(tf.constant(0.01, tf.float64))]):
                    polls += 1
            with tf.control_dependencies([polls]):
                gradients = [tf.ones(variable.shape) for variable in variables]
        return rule.push(gradients, version)

    return step


def held(strategy, rule, step, worker=0):
    """Begins a gated step that is held; returns its future."""
    future = strategy.schedule(step, (HELD,), worker=worker)
    wait_until(lambda: rule.state.workers.pulled_version.numpy()[worker] != NO_STEP)
    return future


def regression(batches, size):
    """Returns batches of inputs, float32 [batches, size, 3], and of their labels, a linear function of them."""
    inputs = np.random.default_rng(1).normal(size=[batches, size, 3]).astype(np.float32)
    return inputs, inputs @ np.array([1.0, -2.0, 0.5], np.float32) + np.float32(0.3)


def regression_step(variables, x, y):
    """Returns the mean squared error of a linear model, a kernel and a bias of Keras, and its gradients."""
    with tf.GradientTape() as tape:
        kernel, bias = (tf.convert_to_tensor(variable) for variable in variables)
        loss = tf.reduce_mean((tf.linalg.matvec(x, kernel) + bias - y) ** 2)
    return loss, tape.gradient(loss, [variable.value for variable in variables])


def value_of(variables):
    """Returns the only value of all elements of the variables."""
    found = {float(number) for variable in variables for number in variable.numpy().ravel()}
    assert len(found) == 1, found
    return found.pop()


def run(strategy, step, worker=0, *args):
    """Runs a step on a worker, and returns its result. Each worker builds a step anew, which takes time."""
    return strategy.schedule(step, args=args, worker=worker).result(TIMEOUT)


def mostly_long(values, *usual):
    """Returns pytest parameters, of which the default suite runs the usual ones and the long suite the others."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else [value]), marks=[pytest.mark.long] * (value not in usual))
        for value in values
    ]
