"""Training loops as users write them, with Keras models, optimizers and metrics as they are."""

import keras
import numpy as np
import tensorflow as tf

TIMEOUT = 60.0

RANDOM = np.random.default_rng(7)
FEATURES = RANDOM.normal(size=(256, 4)).astype(np.float32)
LABELS = FEATURES @ np.array([[1.0], [-2.0], [3.0], [0.5]], np.float32) + 0.7


def new_model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    start = np.random.default_rng(3)
    model.set_weights([start.normal(scale=0.5, size=weight.shape) for weight in model.get_weights()])
    return model


def dataset_fn(_):
    return tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).shuffle(256).repeat().batch(16)


def test_several_steps_may_be_in_one_function(strategy):  # row 14
    with strategy.scope():
        model, optimizer = new_model(), keras.optimizers.RMSprop(0.01)
        metric, steps = keras.metrics.MeanSquaredError(), tf.Variable(0)
        optimizer.build(model.trainable_variables)
    dataset = strategy.experimental_distribute_datasets_from_function(dataset_fn)

    def update(features, labels):
        with tf.GradientTape() as tape:
            predictions = model(features, training=True)
            loss = tf.reduce_mean((predictions - labels) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        metric.update_state(labels, predictions)

    @tf.function
    def ten_steps(iterator):
        for _ in tf.range(10):
            strategy.run(update, args=next(iterator))
            steps.assign_add(1)

    epochs = []
    for _ in range(4):
        metric.reset_state()
        iterator = iter(dataset)
        for _ in range(10):
            strategy.schedule(ten_steps, args=(iterator,))
        strategy.join(TIMEOUT)
        epochs.append(float(metric.result()))
    assert steps.numpy() == 400
    assert epochs[-1] < epochs[0] / 2


def test_an_optimizers_slots_are_on_the_servers_of_their_variables(strategy):  # row 128
    with strategy.scope():
        model = new_model()
        # The first one creates its slots in the first step.
        optimizers = [keras.optimizers.SGD(0.05, momentum=0.9), keras.optimizers.Adam(0.01)]
        optimizers[1].build(model.trainable_variables)

    @tf.function
    def step(features, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(features) - labels) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        for optimizer in optimizers:
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    losses = []
    for count in range(1, 4):
        losses.append(strategy.schedule(step, args=(FEATURES, LABELS)).result(TIMEOUT))
        assert [optimizer.iterations.numpy() for optimizer in optimizers] == [count] * 2
    assert losses[2] < losses[0]
    weights = model.trainable_variables
    for optimizer in optimizers:
        slots = [variable for variable in optimizer.variables if "momentum" in variable.path]
        assert len(slots) == len(weights)
        for slot, weight in zip(slots, weights, strict=True):
            assert slot.value.device == weight.value.device
            assert weight.value.device.startswith("/job:ps/")
            assert np.any(slot.numpy())
