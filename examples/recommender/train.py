"""Trains a recommender whose embedding table grows with the keys that come, on two parameter servers.

coordinator run --workers 2 --ps 2 examples/recommender/train.py

The data are generated advertisements, shaped as Criteo's: counts, categories with rare values, and a click or none.
Each value has a hidden weight, so the best possible AUC is known. The model is DLRM's: products of all pairs of
embeddings and of the counts' layer (Naumov et al., arXiv 1906.00091).
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from sklearn.metrics import roc_auc_score

import coordinator
from coordinator.embeddings import MinCount, Normal, Table, Uniform

COUNTS, CATEGORIES, VALUES, DIM = 4, 8, 20_000, 8
BATCH_SIZE, HELD_OUT = 512, 20_000


def advertisements(size, number):
    """Returns counts, keys, the chances of a click, and clicks; the same for the same number."""
    seed = tf.stack([tf.constant(7, tf.int64), tf.cast(number, tf.int64)])
    counts = tf.math.log1p(tf.exp(tf.random.stateless_normal([size, COUNTS], seed)))
    value = tf.cast(tf.random.stateless_uniform([size, CATEGORIES], seed + 1, dtype=tf.float64) ** 3 * VALUES, tf.int64)
    keys = value * CATEGORIES + tf.range(CATEGORIES, dtype=tf.int64)  # the category is part of the key
    hidden = Normal(0.5, seed=1)(tf.reshape(keys, [-1]), 1)  # a weight for each key, as an initializer makes rows
    chances = tf.sigmoid(counts[:, 0] + tf.reduce_sum(tf.reshape(hidden, [size, CATEGORIES]), axis=1) - 2.0)
    clicks = tf.random.stateless_uniform([size], seed + 2) < chances
    return counts, keys, chances, tf.cast(clicks, tf.float32)


def dataset_fn(context):
    numbers = tf.data.Dataset.range(2**40).shard(context.num_input_pipelines, context.input_pipeline_id)
    return numbers.map(lambda number: advertisements(BATCH_SIZE, number)).prefetch(2)


def build_model():
    counts, rows = keras.Input((COUNTS,)), keras.Input((CATEGORIES, DIM))
    bottom = keras.layers.Dense(DIM)(keras.layers.Dense(32, "relu")(counts))
    vectors = keras.layers.Concatenate(axis=1)([keras.layers.Reshape((1, DIM))(bottom), rows])
    products = keras.layers.Flatten()(keras.layers.Dot(axes=2)([vectors, vectors]))
    features = keras.layers.Concatenate()([bottom, keras.layers.Flatten()(rows), products])
    logits = keras.layers.Dense(1)(keras.layers.Dense(32, "relu")(features))
    return keras.Model([counts, rows], logits[:, 0])


def main(steps):
    keras.utils.set_random_seed(0)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    with coordinator.ParameterServerStrategy(resolver) as strategy:
        with strategy.scope():
            table = Table(
                "values",
                DIM,
                capacity=200_000,
                optimizer=keras.optimizers.Adam(0.003),
                initializer=Uniform(0.05, seed=0),
                admission=MinCount(2),
                when_full="evict_oldest",
            )
            model = build_model()
            optimizer = keras.optimizers.Adam(0.003)
            optimizer.build(model.trainable_variables)
        iterator = iter(strategy.experimental_distribute_datasets_from_function(dataset_fn))

        @tf.function
        def step(iterator):
            counts, keys, _, clicks = next(iterator)
            with tf.GradientTape() as tape:
                logits = model([counts, table.lookup(keys, training=True)], training=True)
                loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(clicks, logits))
            rows, *others = tape.gradient(loss, [table.variable, *model.trainable_variables])
            table.apply_gradients(rows)
            optimizer.apply(others, model.trainable_variables)
            return loss

        @tf.function
        def score():
            counts, keys, chances, clicks = advertisements(HELD_OUT, -1)
            return model([counts, table.lookup(keys)]), chances, clicks  # adds no keys

        for first in range(0, steps, 200):
            losses = [strategy.schedule(step, args=(iterator,)) for _ in range(min(200, steps - first))]
            strategy.join()
            logits, chances, clicks = strategy.schedule(score).result()
            loss = np.mean([future.result() for future in losses])
            print(f"loss {loss:.4f}, held-out AUC {roc_auc_score(clicks, logits):.4f}, {table.size()} keys", flush=True)
        print(f"AUC of the truth {roc_auc_score(clicks, chances):.4f}; {table.statistics()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help=f"of {BATCH_SIZE} examples each")
    main(parser.parse_args().steps)
