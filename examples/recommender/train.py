"""Trains a recommender whose embedding table grows with the keys that come; a sidecar evaluates its checkpoints.

coordinator run --workers 2 --ps 2 --evaluator-workers 1 examples/recommender/train.py

The data are generated advertisements, shaped as Criteo's: counts, categories with rare values, and a click or none.
Each value has a hidden weight, so the best possible AUC is known. The model is DLRM (Naumov et al., arXiv 1906.00091).
"""

import argparse

import keras
import tensorflow as tf
from sklearn.metrics import roc_auc_score

import coordinator
from coordinator.embeddings import Embedding, MinCount, Normal, Table
from coordinator.evaluation import mark_training_finished, mark_training_started

COUNTS, CATEGORIES, VALUES, DIM = 4, 8, 20_000, 8
BATCH_SIZE, EPOCHS, STEPS_PER_EPOCH, HELD_OUT = 512, 6, 400, 20_000


def advertisements(size, number):
    """Returns (counts, keys), clicks, and the chances of a click; the same for the same number."""
    seed = tf.stack([7, tf.cast(number, tf.int64)])
    counts = tf.math.log1p(tf.exp(tf.random.stateless_normal([size, COUNTS], seed)))
    value = tf.cast(tf.random.stateless_uniform([size, CATEGORIES], seed + 1, dtype=tf.float64) ** 3 * VALUES, tf.int64)
    keys = value * CATEGORIES + tf.range(CATEGORIES, dtype=tf.int64)  # the category is part of the key
    hidden = Normal(0.5, seed=1)(tf.reshape(keys, [-1]), 1)  # a weight for each key, as an initializer makes rows
    chances = tf.sigmoid(counts[:, 0] + tf.reduce_sum(tf.reshape(hidden, [size, CATEGORIES]), axis=1) - 2.0)
    clicks = tf.random.stateless_uniform([size], seed + 2) < chances
    return (counts, keys), tf.cast(clicks, tf.float32), chances


def dataset_fn(context):
    numbers = tf.data.Dataset.range(2**40).shard(context.num_input_pipelines, context.input_pipeline_id)
    return numbers.map(lambda number: advertisements(BATCH_SIZE, number)[:2]).prefetch(2)


def build_model():
    keras.utils.set_random_seed(0)
    adam = keras.optimizers.Adam(0.003)
    table = Table("values", DIM, 200_000, adam, admission=MinCount(2), when_full="evict_oldest")  # has a copy of it
    counts, keys = keras.Input((COUNTS,)), keras.Input((CATEGORIES,), dtype="int64")
    rows, bottom = Embedding(table)(keys), keras.layers.Dense(DIM)(keras.layers.Dense(32, "relu")(counts))
    vectors = keras.layers.Concatenate(axis=1)([keras.layers.Reshape((1, DIM))(bottom), rows])
    products = keras.layers.Flatten()(keras.layers.Dot(axes=2)([vectors, vectors]))
    features = keras.layers.Concatenate()([bottom, keras.layers.Flatten()(rows), products])
    logits = keras.layers.Dense(1)(keras.layers.Dense(32, "relu")(features))
    model = keras.Model([counts, keys], logits[:, 0])
    auc = keras.metrics.AUC(num_thresholds=2000, from_logits=True, name="auc")
    model.compile(adam, keras.losses.BinaryCrossentropy(from_logits=True), metrics=[auc])
    adam.build(model.trainable_variables)
    return model


def train(resolver, directory):
    mark_training_started(directory)
    with coordinator.ParameterServerStrategy(resolver) as strategy:
        with strategy.scope():
            model = build_model()
        iterator = iter(strategy.experimental_distribute_datasets_from_function(dataset_fn))
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)  # has the table, by its layer
        manager = tf.train.CheckpointManager(checkpoint, directory, max_to_keep=6)

        @tf.function
        def step(iterator):
            inputs, clicks = next(iterator)
            with tf.GradientTape() as tape:
                loss = model.loss(clicks, model(inputs, training=True))
            model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        for epoch in range(1, EPOCHS + 1):
            strategy.schedule(step, args=(iterator,), steps=STEPS_PER_EPOCH).result()
            manager.save(checkpoint_number=epoch * STEPS_PER_EPOCH)
        mark_training_finished(directory)


def evaluate(resolver, directory):
    inputs, clicks, chances = advertisements(HELD_OUT, -1)
    print(f"AUC of the truth {roc_auc_score(clicks, chances):.4f}", flush=True)
    data = coordinator.data.arrays(inputs, clicks)
    with coordinator.ParameterServerStrategy(resolver) as strategy:  # on servers that only evaluate
        with strategy.scope():
            model = build_model()
        coordinator.SidecarEvaluator(model, data, directory, batch_size=2000, on_evaluation=print_auc).start()


def print_auc(result):
    print(f"step {result.step}: held-out AUC {result.metrics['auc']:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default="logs/recommender", help="for checkpoints")
    directory = parser.parse_args().directory
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    evaluate(resolver, directory) if resolver.task_type == "evaluator" else train(resolver, directory)
