"""Trains on handwritten digits, and continues from its latest checkpoint when it is killed and restarted.

coordinator run --workers 2 --ps 1 --restarts 3 examples/restart/train.py

Kill the program while it trains (it prints its process id): it is restarted on the same servers, says from which step
it continues, and ends by itself when all steps are done. The servers free the variables of the killed program.
"""

import argparse
import os

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import coordinator

STEPS, STEPS_PER_CHECKPOINT, BATCH_SIZE = 1200, 60, 64


def dataset_fn(context):
    images, labels = load_digits(return_X_y=True)
    dataset = tf.data.Dataset.from_tensor_slices((images.astype("float32") / 16, labels))
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    return dataset.shuffle(len(images)).repeat().batch(BATCH_SIZE).prefetch(2)


def build_model():
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((64,)), dense(64, "relu"), dense(10)])
    model.compile(keras.optimizers.Adam(2e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    # Now, so that a checkpoint finds the optimizer's variables when it is restored.
    model.optimizer.build(model.trainable_variables)
    return model


def train(strategy, directory):
    with strategy.scope():
        model = build_model()
        trained_steps = tf.Variable(0, dtype=tf.int64, trainable=False)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer, step=trained_steps)
    manager = tf.train.CheckpointManager(checkpoint, directory, max_to_keep=3)
    manager.restore_or_initialize()
    print(f"process {os.getpid()} begins at step {int(trained_steps)}", flush=True)
    iterator = iter(strategy.experimental_distribute_datasets_from_function(dataset_fn))

    @tf.function
    def step(iterator):
        images, labels = next(iterator)
        with tf.GradientTape() as tape:
            loss = model.loss(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        trained_steps.assign_add(1)

    while (done := int(trained_steps)) < STEPS:
        for _ in range(min(STEPS_PER_CHECKPOINT, STEPS - done)):
            strategy.schedule(step, args=(iterator,))
        strategy.join()  # so that no step is partly in the checkpoint
        manager.save(checkpoint_number=trained_steps)
    return model, int(trained_steps)


def main(directory):
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    with coordinator.ParameterServerStrategy(resolver) as strategy:
        model, steps = train(strategy, directory)
        images, labels = load_digits(return_X_y=True)
        guesses = model(images.astype("float32") / 16).numpy().argmax(axis=1)
    accuracy = (guesses == labels).mean()
    print(f"{steps} steps, accuracy {accuracy:.4f}", flush=True)
    if steps < STEPS or accuracy < 0.95:
        raise SystemExit("That is less than was to be shown.")


if __name__ == "__main__":
    tf.get_logger().setLevel("ERROR")  # it warns that each checkpoint traces a function again
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default="logs/restart", help="for checkpoints")
    main(parser.parse_args().directory)
