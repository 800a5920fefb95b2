"""Trains a small network on handwritten digits, asynchronously, while a sidecar evaluates its checkpoints.

coordinator run --workers 2 --ps 1 --evaluator examples/digits/train.py
"""

import argparse
import concurrent.futures

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import coordinator
from coordinator.evaluation import mark_training_finished, mark_training_started

BATCH_SIZE, STEPS_PER_EPOCH = 64, 100


def load_data():
    """1,797 images of 8 x 8 pixels with 16 grey levels: three quarters to train, one quarter held out."""
    images, labels = load_digits(return_X_y=True)
    return train_test_split(images.astype("float32") / 16, labels, test_size=0.25, random_state=0, stratify=labels)


def build_model():
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((64,)), dense(128, "relu"), dense(64, "relu"), dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    model.optimizer.build(model.trainable_variables)
    return model


def train(resolver, directory, epochs):
    images, _, labels, _ = load_data()

    def dataset_fn(context):
        dataset = tf.data.Dataset.from_tensor_slices((images, labels))
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.shuffle(len(images)).repeat().batch(BATCH_SIZE).prefetch(2)

    mark_training_started(directory)
    with coordinator.ParameterServerStrategy(resolver) as strategy:
        with strategy.scope():
            model = build_model()
            trained_steps = tf.Variable(0, dtype=tf.int64, trainable=False)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer, step=trained_steps)
        manager = tf.train.CheckpointManager(checkpoint, directory, max_to_keep=3)
        iterator = iter(strategy.experimental_distribute_datasets_from_function(dataset_fn))

        @tf.function
        def step(iterator):
            images, labels = next(iterator)
            with tf.GradientTape() as tape:
                loss = model.loss(labels, model(images, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)
            trained_steps.assign_add(1)
            return loss

        with tqdm(total=epochs * STEPS_PER_EPOCH, unit="step") as progress:
            for _ in range(epochs):
                futures = [strategy.schedule(step, args=(iterator,)) for _ in range(STEPS_PER_EPOCH)]
                for future in concurrent.futures.as_completed(futures):
                    progress.set_postfix(loss=f"{future.result():.4f}", refresh=False)
                    progress.update()
                strategy.join()
                manager.save(checkpoint_number=trained_steps)
    mark_training_finished(directory)
    print(f"Trained for {epochs * STEPS_PER_EPOCH} steps. Checkpoints and TensorBoard summaries are in {directory}.")


def evaluate(directory):
    _, images, _, labels = load_data()
    data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(256)

    def report(result):
        print(f"step {result.step}: held-out accuracy {result.metrics['accuracy']:.4f}", flush=True)

    summaries = f"{directory}/summaries"
    evaluator = coordinator.SidecarEvaluator(build_model(), data, directory, on_evaluation=report, log_dir=summaries)
    print(f"final held-out accuracy {evaluator.start()[-1].metrics['accuracy']:.4f}", flush=True)


if __name__ == "__main__":
    tf.get_logger().setLevel("ERROR")  # it warns that each checkpoint traces a function again
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default="logs/digits", help="for checkpoints and summaries")
    parser.add_argument("--epochs", type=int, default=12, help=f"of {STEPS_PER_EPOCH} steps each")
    arguments = parser.parse_args()
    # TF_CONFIG, which `coordinator run` sets, says whether this process is the client or the evaluator.
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type == "evaluator":
        evaluate(arguments.directory)
    else:
        train(resolver, arguments.directory, arguments.epochs)
