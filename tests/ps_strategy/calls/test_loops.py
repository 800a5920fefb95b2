"""Training loops as users write them, with Keras models, optimizers and metrics as they are."""

import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

TIMEOUT = 60.0
BATCH = 16

RANDOM = np.random.default_rng(7)
FEATURES = RANDOM.normal(size=(256, 4)).astype(np.float32)
LABELS = FEATURES @ np.array([[1.0], [-2.0], [3.0], [0.5]], np.float32) + 0.7


def new_model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    start = np.random.default_rng(3)
    model.set_weights([start.normal(scale=0.5, size=weight.shape) for weight in model.get_weights()])
    return model


def loss_of(model):
    return float(np.mean((model(FEATURES).numpy() - LABELS) ** 2))


def dataset_fn(_):
    return tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).shuffle(256).repeat().batch(BATCH)


class Training:
    """A model in training: the variables that its step uses."""

    def __init__(self, optimizer):
        self.model = new_model()
        self.optimizer = optimizer
        self.metric = keras.metrics.MeanSquaredError()
        self.optimizer.build(self.model.trainable_variables)

    def update(self, batch):
        features, labels = batch
        with tf.GradientTape() as tape:
            predictions = self.model(features, training=True)
            loss = tf.reduce_mean((predictions - labels) ** 2)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        self.metric.update_state(labels, predictions)
        return loss


@pytest.fixture
def training(strategy):
    with strategy.scope():
        return Training(keras.optimizers.SGD(0.05))


@pytest.fixture
def dataset(strategy):
    return strategy.experimental_distribute_datasets_from_function(dataset_fn)


@pytest.fixture(scope="module")
def loss_of_one_process():
    """Returns the loss after 120 steps of the same training without a strategy."""
    training = Training(keras.optimizers.SGD(0.05))
    step = tf.function(training.update)
    for batch in dataset_fn(None).take(120):
        step(batch)
    return loss_of(training.model)


def step_in_place(_, training):
    return tf.function(lambda iterator: training.update(next(iterator)))


def step_by_run(strategy, training):
    return tf.function(lambda iterator: strategy.run(training.update, args=(next(iterator),)))


@pytest.mark.parametrize("make_step", [pytest.param(step_in_place, marks=pytest.mark.long), step_by_run])
def test_a_loop_that_joins_at_each_epochs_end_learns(strategy, training, dataset, make_step, loss_of_one_process):
    step = make_step(strategy, training)
    before, epochs = loss_of(training.model), []
    for _ in range(4):
        training.metric.reset_state()
        iterator = iter(dataset)
        for _ in range(30):
            strategy.schedule(step, args=(iterator,))
        strategy.join(TIMEOUT)
        epochs.append(float(training.metric.result()))
    assert epochs[0] < before
    assert epochs[-1] < epochs[0] / 2
    assert_as_good(training.model, before, loss_of_one_process)


@pytest.mark.long
def test_a_fully_asynchronous_loop_learns(strategy, training, dataset, loss_of_one_process):
    step = step_in_place(strategy, training)
    before, seen, pause = loss_of(training.model), [], threading.Event()
    iterator = iter(dataset)
    for _ in range(120):
        strategy.schedule(step, args=(iterator,))
    deadline = time.monotonic() + 2 * TIMEOUT
    while not strategy.done():
        seen.append(f"loss so far: {float(training.metric.result()):.3f}")
        pause.wait(0.02)
        assert time.monotonic() < deadline, strategy.cluster.statistics()
    assert seen
    assert_as_good(training.model, before, loss_of_one_process)


def assert_as_good(model, before, loss_of_one_process):
    """Asserts that most of the loss that one process removes is removed: stale gradients cost little at this size."""
    learnt, expected = before - loss_of(model), before - loss_of_one_process
    assert learnt > 0.8 * expected


@pytest.mark.parametrize(("epoch_count", "factor"), [(4, 2), pytest.param(10, 4, marks=pytest.mark.long)])
def test_several_steps_may_be_in_one_function(strategy, epoch_count, factor):  # row 14
    with strategy.scope():
        training = Training(keras.optimizers.RMSprop(0.01))
        steps = tf.Variable(0)
    dataset = strategy.experimental_distribute_datasets_from_function(dataset_fn)

    @tf.function
    def ten_steps(iterator):
        for _ in tf.range(10):
            training.update(next(iterator))
            steps.assign_add(1)

    epochs = []
    for _ in range(epoch_count):
        training.metric.reset_state()
        iterator = iter(dataset)
        for _ in range(10):
            strategy.schedule(ten_steps, args=(iterator,))
        strategy.join(TIMEOUT)
        epochs.append(float(training.metric.result()))
    assert steps.numpy() == 100 * epoch_count
    assert epochs[-1] < epochs[0] / factor


def test_an_optimizers_slots_are_on_the_servers_of_their_variables(strategy):  # row 128
    with strategy.scope():
        training = Training(keras.optimizers.Adam(0.01))
    iterator = iter(strategy.experimental_distribute_datasets_from_function(dataset_fn))
    step = step_in_place(strategy, training)
    for count in range(1, 4):
        strategy.schedule(step, args=(iterator,))
        strategy.join(TIMEOUT)
        assert training.optimizer.iterations.numpy() == count
    weights = training.model.trainable_variables
    slots = [variable for variable in training.optimizer.variables if "momentum" in variable.path]
    assert len(slots) == len(weights)
    for slot, weight in zip(slots, weights, strict=True):
        assert slot.value.device == weight.value.device
        assert weight.value.device.startswith("/job:ps/")
        assert np.any(slot.numpy())


def test_an_optimizer_may_create_its_slots_in_the_first_step(strategy):  # row 128
    with strategy.scope():
        model, optimizer = new_model(), keras.optimizers.SGD(0.05, momentum=0.9)

    @tf.function
    def step(features, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(features) - labels) ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    losses = [strategy.schedule(step, args=(FEATURES, LABELS)).result(TIMEOUT) for _ in range(3)]
    assert losses[2] < losses[0]
    assert optimizer.iterations.numpy() == 3
    assert all("/job:ps/" in variable.value.device for variable in optimizer.variables)
