"""Models, optimizers and metrics of Keras 2 (the package tf_keras) in custom loops."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

STEPS = 40
FEATURES = np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32)
LABELS = (FEATURES @ [[1.0], [-2.0], [0.5], [1.0]]).astype(np.float32)
OPTIMIZERS = {
    "Adam": lambda: tf_keras.optimizers.Adam(0.05),
    "legacy Adam": lambda: tf_keras.optimizers.legacy.Adam(0.05),
}


class Training:
    """A model with moving statistics, an optimizer, metrics, and a step that uses them all."""

    def __init__(self, optimizer):
        layers = tf_keras.layers
        hidden = layers.Dense(8, "tanh", kernel_initializer=tf_keras.initializers.GlorotUniform(1))
        last = layers.Dense(1, kernel_initializer=tf_keras.initializers.GlorotUniform(2))
        self.model = tf_keras.Sequential([layers.Input((4,)), hidden, layers.BatchNormalization(), last])
        self.optimizer = OPTIMIZERS[optimizer]()
        self.mean = tf_keras.metrics.Mean()
        self.step = tf.function(self.train)

    def train(self, features, labels):
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            predicted = self.model(features, training=True)
            loss = tf.reduce_mean((predicted - labels) ** 2)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.mean.update_state([1.0, 2.0, 6.0])
        return loss


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_model_of_keras_2_learns_and_every_step_is_counted(strategy, optimizer):
    with strategy.scope():
        training = Training(optimizer)
    here = Training(optimizer)
    for _ in range(2):
        first_loss = strategy.schedule(training.step, args=(FEATURES, LABELS)).result()
        np.testing.assert_allclose(first_loss, here.step(FEATURES, LABELS), rtol=1e-4)
    for one, other in zip(training.model.get_weights(), here.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert all("/job:ps" in variable.device for variable in training.model.variables)

    losses = [strategy.schedule(training.step, args=(FEATURES, LABELS)) for _ in range(STEPS)]
    strategy.join()
    assert np.mean(strategy.local_results(losses)[-5:]) < first_loss
    assert int(training.optimizer.iterations) == 2 + STEPS
    assert (float(training.mean.count), float(training.mean.result())) == (3 * (2 + STEPS), 3.0)


@pytest.mark.filterwarnings("ignore")  # TensorFlow's, about a function that runs on the client
def test_fit_of_keras_2_says_what_works_instead(strategy):
    with strategy.scope():
        model = tf_keras.Sequential([tf_keras.layers.Input((4,)), tf_keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    for call in (lambda: model.fit(FEATURES, LABELS, verbose=0), lambda: model.predict(FEATURES, verbose=0)):
        with pytest.raises(AttributeError, match=r"Keras 2 .* schedule a step of your own.* coordinator\.compat"):
            call()
