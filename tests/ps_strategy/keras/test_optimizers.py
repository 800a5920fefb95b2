"""Tests of every Keras 3 optimizer in a scheduled step: counts are exact, and single steps equal Keras in one process.

All optimizers are in one function, each with its own copy of a small model, so that they are traced and scheduled once.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.ps_strategy.tensorflow_internals.private_names import accumulated_gradients

TIMEOUT = 240.0
STEPS = 4
RACING_STEPS = 31

optimizers = keras.optimizers


def schedule():
    return optimizers.schedules.ExponentialDecay(0.1, decay_steps=4, decay_rate=0.9)


def by_rank(of_vectors, of_matrices):
    return optimizers.MultiOptimizer(lambda variable: of_matrices if len(variable.shape) > 1 else of_vectors)


OPTIMIZERS = {
    "SGD": lambda: optimizers.SGD(0.1),
    "SGD with momentum": lambda: optimizers.SGD(0.05, momentum=0.9),
    "SGD, Nesterov's": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
    "Adadelta": lambda: optimizers.Adadelta(5.0),
    "Adam": lambda: optimizers.Adam(0.02),
    "Adam, AMSGrad": lambda: optimizers.Adam(0.02, amsgrad=True),
    "AdamW": lambda: optimizers.AdamW(0.02, weight_decay=0.01),
    "Adamax": lambda: optimizers.Adamax(0.02),
    "RMSprop": lambda: optimizers.RMSprop(0.01),
    "RMSprop, centered, with momentum": lambda: optimizers.RMSprop(0.002, centered=True, momentum=0.5, epsilon=0.01),
    "Ftrl": lambda: optimizers.Ftrl(0.1),
    "Nadam": lambda: optimizers.Nadam(0.02),
    "Lion": lambda: optimizers.Lion(0.01),
    "Adafactor": lambda: optimizers.Adafactor(0.05),
    "Lamb": lambda: optimizers.Lamb(0.02),
    "Muon": lambda: optimizers.Muon(0.02),
    "ScheduleFreeAdamW": lambda: optimizers.ScheduleFreeAdamW(0.02),
    "LearningRateSchedule": lambda: optimizers.SGD(schedule()),
    "weight_decay": lambda: optimizers.SGD(0.1, weight_decay=0.01),
    "clipnorm": lambda: optimizers.SGD(0.1, clipnorm=0.5),
    "clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.1),
    "global_clipnorm": lambda: optimizers.SGD(0.1, global_clipnorm=0.5),
    "use_ema": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "loss_scale_factor": lambda: optimizers.Adam(0.02, loss_scale_factor=8.0),
    "gradient_accumulation_steps": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "MultiOptimizer": lambda: by_rank(optimizers.SGD(0.1), optimizers.Adam(0.02)),
    "LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.02), 8.0, dynamic_growth_steps=3),
}
# Averages and a loss scale are among those of `internals/test_row_updates.py`.
DEFAULT = ("Adam", "LearningRateSchedule", "gradient_accumulation_steps")
# With this one, Keras does not support `tf.IndexedSlices`, in one process either.
DENSE_ONLY = {"loss_scale_factor"}
# These are given sparse gradients as they are, and change all rows.
CHANGE_WHOLE_VARIABLES = {"Adafactor", "Lamb", "Muon", "ScheduleFreeAdamW", "gradient_accumulation_steps"}
INITIAL = [np.random.default_rng(0).normal(size=(7, 2)).astype(np.float32), np.zeros(2, np.float32)]


def batch(number):
    random = np.random.default_rng(number)
    # Every step has all rows, since others stay; some of them several times.
    rows = np.concatenate([random.permutation(7), random.integers(0, 7, size=9)])
    return rows, random.normal(size=(16, 2)).astype(np.float32) * 0.1


class Training:
    """A table of which rows are looked up, a bias, and an optimizer for both."""

    def __init__(self, name, is_sparse=True):
        self.is_sparse = is_sparse and name not in DENSE_ONLY
        self.weights = [keras.Variable(value) for value in INITIAL]
        self.optimizer = OPTIMIZERS[name]()
        self.optimizer.build(self.weights)

    def loss(self, rows, labels):
        table, bias = (weight.value for weight in self.weights)
        return tf.reduce_mean((tf.tanh(tf.gather(table, rows)) + bias - labels) ** 2)

    def step(self, rows, labels):
        with tf.GradientTape() as tape:
            loss = self.optimizer.scale_loss(self.loss(rows, labels))
        gradients = tape.gradient(loss, [weight.value for weight in self.weights])
        if not self.is_sparse:
            gradients[0] = tf.convert_to_tensor(gradients[0])
        self.optimizer.apply_gradients(zip(gradients, self.weights, strict=True))

    def loss_on_all(self):
        return float(np.mean([self.loss(*batch(number)) for number in range(4)]))


@pytest.fixture(scope="module", params=[DEFAULT, pytest.param(OPTIMIZERS, marks=pytest.mark.long)], ids=["some", "all"])
def trained(strategy, request):
    """Trainings, the step of all, and their weights after steps on the workers, one at a time."""
    with strategy.scope():
        trainings = {name: Training(name) for name in request.param}

    @tf.function
    def step(rows, labels):
        for training in trainings.values():
            training.step(rows, labels)

    for number in range(STEPS):
        strategy.schedule(step, args=batch(number)).result(TIMEOUT)
    return trainings, step, {name: [each.numpy() for each in one.weights] for name, one in trainings.items()}


def test_one_step_at_a_time_gives_the_same_as_one_process(trained):
    for name, values in trained[2].items():
        # If repeated rows are not summed first, Keras may add up squares of gradients, not the square of the sum.
        here = Training(name, is_sparse=name in CHANGE_WHOLE_VARIABLES)
        for number in range(STEPS):
            here.step(*batch(number))
        for value, expected, initial in zip(values, here.weights, INITIAL, strict=True):
            np.testing.assert_allclose(value, expected.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)
            assert not np.allclose(value, initial), name


@pytest.mark.long
def test_racing_workers_count_every_step_and_every_optimizer_learns(strategy, trained):
    trainings, step, _ = trained
    for number in range(RACING_STEPS):
        strategy.schedule(step, args=batch(number))
    strategy.join(TIMEOUT)
    before = Training("SGD").loss_on_all()
    for name, training in trainings.items():
        accumulated = training.optimizer.gradient_accumulation_steps or 1
        assert int(training.optimizer.iterations) == (STEPS + RACING_STEPS) // accumulated, name
        assert training.loss_on_all() < before, name


def run_with_gradients_of_one(strategy, make_optimizer, is_finite, read=lambda optimizer: ()):
    """Returns weights and optimizer after these steps, and the result of `read` in each."""
    with strategy.scope():
        weights = [keras.Variable(np.zeros(2, np.float32)) for _ in range(2)]
        optimizer = make_optimizer()
        optimizer.build(weights)

    @tf.function
    def step(is_finite):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(weight.value) for weight in weights])
            scaled = optimizer.scale_loss(loss) * tf.where(is_finite, 1.0, np.inf)
        optimizer.apply(tape.gradient(scaled, [weight.value for weight in weights]), weights)
        return read(optimizer)

    futures = [strategy.schedule(step, args=(tf.constant(each),)) for each in is_finite]
    strategy.join(TIMEOUT)
    return weights, optimizer, [future.result(TIMEOUT) for future in futures]


def test_gradients_are_unscaled_correctly_while_the_loss_scale_changes(strategy):
    is_finite = [number % 6 != 5 for number in range(30)]
    weights, optimizer, scales = run_with_gradients_of_one(
        strategy,
        lambda: optimizers.LossScaleOptimizer(optimizers.SGD(1.0), 2.0**10, dynamic_growth_steps=2),
        is_finite,
        lambda optimizer: optimizer.dynamic_scale + 0.0,
    )
    for weight in weights:
        np.testing.assert_array_equal(weight.numpy(), [-sum(is_finite)] * 2)
    assert int(optimizer.iterations) == sum(is_finite)
    # It rises and falls depending on the order of the workers.
    assert len(set(scales)) > 1
    assert 0.0 not in scales
    np.testing.assert_array_equal(np.log2(scales), np.round(np.log2(scales)))


@pytest.mark.long
def test_racing_workers_that_accumulate_gradients_apply_almost_all(strategy):
    steps = 3
    weights, optimizer, _ = run_with_gradients_of_one(
        strategy, lambda: optimizers.SGD(1.0, gradient_accumulation_steps=steps), [True] * 60
    )
    assert int(optimizer.iterations) == 60 // steps
    for weight, waiting in zip(weights, accumulated_gradients(optimizer), strict=True):
        # The number of gradients in each update depends on the race.
        counted = waiting.numpy() - steps * weight.numpy()
        assert np.all((counted > 30) & (counted < 90)), counted
