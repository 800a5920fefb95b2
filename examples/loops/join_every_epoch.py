"""The first loop of the RFC: schedule an epoch's steps, join, look at the metric, begin the next epoch.

coordinator run --workers 2 --ps 1 examples/loops/join_every_epoch.py

Learns the weights of a linear function from noisy samples; prints the loss of each epoch and the weights at the end.
"""

import keras
import tensorflow as tf

import coordinator

TRUE_WEIGHTS = (2.0, -3.0, 0.5, 1.0)
EPOCHS, STEPS_PER_EPOCH, BATCH_SIZE = 5, 40, 32


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
        loss_sum = tf.Variable(0.0, trainable=False)
    dataset = strategy.experimental_distribute_datasets_from_function(dataset_fn)

    @tf.function
    def step(iterator):
        features, labels = next(iterator)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(features)[:, 0] - labels))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        loss_sum.assign_add(loss)

    with strategy:
        for epoch in range(EPOCHS):
            iterator = iter(dataset)
            loss_sum.assign(0.0)
            for _ in range(STEPS_PER_EPOCH):
                strategy.schedule(step, args=(iterator,))
            strategy.join()
            print(f"epoch {epoch}: loss {loss_sum.numpy() / STEPS_PER_EPOCH:.4f}")
        print("weights", " ".join(f"{weight:.2f}" for weight in model.weights[0].numpy()[:, 0]))


if __name__ == "__main__":
    main()
