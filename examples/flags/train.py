"""Flags and a log of absl, as TensorFlow's programs have them: fits a line to noisy points.

coordinator run --workers 2 --ps 1 examples/flags/train.py --steps=200 --learning_rate=0.2

`app.run` parses the flags and installs absl's handler, which writes the library's log lines too, in absl's format:
`--verbosity=-1` leaves out INFO, `--logger_levels=coordinator:ERROR` leaves out what the library logs.
"""

import keras
import tensorflow as tf
from absl import app, flags, logging

import coordinator

STEPS = flags.DEFINE_integer("steps", 200, "How many steps to train.", lower_bound=1)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.2, "The learning rate of SGD.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "Points in each step.", lower_bound=1)

SLOPE, INTERCEPT = 2.0, -1.0


def dataset_fn(context):
    def points(number):
        # Every worker draws its own numbers, so that no two workers see the same points.
        seed = tf.stack([number, tf.constant(context.input_pipeline_id, tf.int64)])
        x = tf.random.stateless_uniform([BATCH_SIZE.value, 1], seed, -1.0, 1.0)
        return x, SLOPE * x + INTERCEPT + tf.random.stateless_normal([BATCH_SIZE.value, 1], seed + 1, stddev=0.05)

    return tf.data.Dataset.counter().map(points)


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}")
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    with coordinator.ParameterServerStrategy(resolver) as strategy:
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            optimizer = keras.optimizers.SGD(LEARNING_RATE.value)
        iterator = iter(strategy.experimental_distribute_datasets_from_function(dataset_fn))

        @tf.function
        def step(iterator):
            x, y = next(iterator)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x) - y))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        losses = [strategy.schedule(step, args=(iterator,)) for _ in range(STEPS.value)]
        strategy.join()
        logging.info("%d steps, last loss %.4f", STEPS.value, losses[-1].result())
        slope, intercept = (float(weight.numpy().item()) for weight in model.weights)
        print(f"slope {slope:.2f}, intercept {intercept:.2f}")


if __name__ == "__main__":
    app.run(main)
