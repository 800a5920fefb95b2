"""Trains on handwritten digits under an update rule, and prints the rule's statistics.

coordinator run --workers 3 --ps 2 examples/update_rules/train.py

`--rule` takes another one: see `RULES`. `docs/updates` says what each guarantees.
"""

import argparse
import concurrent.futures

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import coordinator
from coordinator import updates

RULES = {
    "asynchronous": updates.Asynchronous,
    "modulated": lambda *model: updates.Asynchronous(*model, lr_staleness_modulation=True),
    "synchronous": lambda *model: updates.Synchronous(*model, grads_to_wait=2),
    "stale-synchronous": lambda *model: updates.StaleSynchronous(*model, get_model_frequency=4, max_lead=8),
    "bounded-delay": lambda *model: updates.BoundedDelay(*model, max_delay=2),
    "model-average": updates.ModelAverage,
}
BATCH_SIZE, STEPS_PER_EPOCH = 32, 150


def load_data():
    images, labels = load_digits(return_X_y=True)
    return train_test_split(images.astype("float32") / 16, labels, test_size=0.25, random_state=0, stratify=labels)


def build_model():
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((64,)), dense(64, "relu"), dense(10)])


def train(strategy, make_rule, epochs, directory):
    images, held_out_images, labels, held_out_labels = load_data()

    def dataset_fn(_):
        dataset = tf.data.Dataset.from_tensor_slices((images, labels))
        return dataset.shuffle(len(images)).repeat().batch(BATCH_SIZE).prefetch(2)

    iterator = iter(strategy.experimental_distribute_datasets_from_function(dataset_fn))
    with strategy.scope():
        model = build_model()
        rule = make_rule(keras.optimizers.SGD(0.2), model.trainable_variables)

    def gradients_of(images, labels):
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        return loss, tape.gradient(loss, model.trainable_variables)

    @tf.function
    def step(iterator):
        return rule.run(gradients_of, *next(iterator))  # pull, gradients, push; again if they are rejected

    with tf.summary.create_file_writer(directory).as_default(), tqdm(total=epochs * STEPS_PER_EPOCH) as progress:
        for epoch in range(epochs):
            futures = [strategy.schedule(step, args=(iterator,)) for _ in range(STEPS_PER_EPOCH)]
            for future in concurrent.futures.as_completed(futures):
                progress.set_postfix(loss=f"{future.result():.4f}", refresh=False)
                progress.update()
            strategy.join()
            rule.statistics().write_summaries(epoch)
    if isinstance(rule, updates.ModelAverage):
        rule.abort()  # so that the model is the mean of all workers' models
    guesses = model(held_out_images).numpy().argmax(axis=1)
    print(rule.statistics())
    print(f"held-out accuracy {(guesses == held_out_labels).mean():.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rule", choices=RULES, default="asynchronous")
    parser.add_argument("--epochs", type=int, default=4, help=f"of {STEPS_PER_EPOCH} steps each")
    parser.add_argument("--directory", default="logs/update_rules", help="for TensorBoard summaries")
    arguments = parser.parse_args()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    with coordinator.ParameterServerStrategy(resolver) as strategy:
        train(strategy, RULES[arguments.rule], arguments.epochs, arguments.directory)
