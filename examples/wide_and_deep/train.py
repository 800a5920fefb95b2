"""Trains a wide-and-deep model on a table of patients with `model.fit`, on two workers and two parameter servers.

coordinator run --workers 2 --ps 2 examples/wide_and_deep/train.py

The table is scikit-learn's breast cancer data: 30 measurements of 569 tumours. The deep part takes the measurements;
the wide part takes crosses of them, in buckets and hashed. Source: arXiv 1606.07792 (Cheng et al. 2016).
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

import coordinator

BUCKETS, CROSSES, SLOTS = 8, 12, 512


def build_model(measurements):
    inputs = keras.Input((measurements.shape[1],))
    normalize = keras.layers.Normalization()
    normalize.adapt(measurements)
    scaled = normalize(inputs)
    deep = keras.layers.Dense(32, "relu")(scaled)
    deep = keras.layers.Dense(16, "relu")(keras.layers.Dropout(0.2)(deep))

    # Two neighbours' buckets are one number, which is a row of the wide part's table of weights.
    bucket = keras.layers.Discretization([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0])(scaled)
    pairs = keras.layers.Lambda(
        lambda b: b[:, :CROSSES] * BUCKETS + b[:, 1 : CROSSES + 1] + tf.range(CROSSES, dtype=b.dtype) * BUCKETS**2
    )(bucket)
    slots = keras.layers.Hashing(SLOTS)(pairs)
    wide = keras.layers.Embedding(SLOTS, 1, embeddings_initializer="zeros")(slots)
    wide = keras.layers.Lambda(lambda weights: tf.reduce_sum(weights, axis=[1, 2])[:, None])(wide)
    return keras.Model(inputs, keras.layers.Activation("sigmoid")(keras.layers.Dense(1)(deep) + wide))


def main():
    data = load_breast_cancer()
    x, held_out_x, y, held_out_y = train_test_split(
        data.data.astype("float32"), data.target, random_state=0, stratify=data.target
    )
    with coordinator.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver()) as strategy:
        with strategy.scope():
            model = build_model(x)
            model.compile(keras.optimizers.Adam(3e-3), "binary_crossentropy", metrics=["accuracy", "auc"])
        model.fit(x, y, batch_size=32, epochs=12, validation_data=(held_out_x, held_out_y), verbose=2)
        accuracy = np.mean((model.predict(held_out_x, verbose=0)[:, 0] > 0.5) == held_out_y)
        print(f"held-out accuracy {accuracy:.3f}")
        assert accuracy > 0.93


if __name__ == "__main__":
    main()
