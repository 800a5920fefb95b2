"""The second loop of the RFC: schedule every step at once, and print the metric while the workers are at it.

coordinator run --workers 2 --ps 1 examples/loops/fully_asynchronous.py

Learns the weights of a linear function from noisy samples; prints the loss now and then, and the weights at the end.
"""

import threading

import keras
import tensorflow as tf

import coordinator

TRUE_WEIGHTS = (2.0, -3.0, 0.5, 1.0)
STEPS, BATCH_SIZE = 300, 32


def dataset_fn(context):
    def sample(number):
        # Every worker draws its own numbers, so that no two workers see the same samples.
        seed = tf.stack([number, tf.constant(context.input_pipeline_id, tf.int64)])
        features = tf.random.stateless_normal([len(TRUE_WEIGHTS)], seed)
        noise = tf.random.stateless_normal([], seed + 1, stddev=0.05)
        return features, tf.tensordot(features, TRUE_WEIGHTS, 1) + noise

    return tf.data.Dataset.counter().map(sample).batch(BATCH_SIZE)


def main():
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = coordinator.ParameterServerStrategy(resolver)
    with strategy.scope():
        model = keras.Sequential([keras.Input((len(TRUE_WEIGHTS),)), keras.layers.Dense(1, use_bias=False)])
        optimizer = keras.optimizers.SGD(0.1)
        recent_loss = tf.Variable(0.0, trainable=False)
    iterator = iter(strategy.experimental_distribute_datasets_from_function(dataset_fn))

    @tf.function
    def step(iterator):
        features, labels = next(iterator)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(features)[:, 0] - labels))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        recent_loss.assign(loss)

    with strategy:
        for _ in range(STEPS):
            strategy.schedule(step, args=(iterator,))
        pause = threading.Event()
        while not strategy.done():
            print(f"{strategy.cluster.statistics().finished} steps, loss {recent_loss.numpy():.4f}")
            pause.wait(0.25)
        strategy.join()
        print("weights", " ".join(f"{weight:.2f}" for weight in model.weights[0].numpy()[:, 0]))


if __name__ == "__main__":
    main()
