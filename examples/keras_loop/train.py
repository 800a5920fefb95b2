"""Trains a Keras model on handwritten digits in a custom loop, on two workers and a parameter server.

coordinator run --workers 2 --ps 1 examples/keras_loop/train.py
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import coordinator

EPOCHS, STEPS_PER_EPOCH, BATCH_SIZE = 10, 40, 64


def main():
    images, labels = load_digits(return_X_y=True)
    images, held_out_images, labels, held_out_labels = train_test_split(images / 16, labels, random_state=0)

    def dataset_fn(_):
        # Each worker has all images, in a different order.
        return tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images)).repeat().batch(BATCH_SIZE)

    with coordinator.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver()) as strategy:
        with strategy.scope():
            dense = keras.layers.Dense
            model = keras.Sequential([keras.Input((64,)), dense(128, "relu"), dense(10)])
            loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            rate = keras.optimizers.schedules.CosineDecay(5e-3, EPOCHS * STEPS_PER_EPOCH)
            optimizer = keras.optimizers.AdamW(rate, weight_decay=1e-3)
            accuracy = keras.metrics.SparseCategoricalAccuracy()
        iterator = iter(strategy.distribute_datasets_from_function(dataset_fn))

        @tf.function
        def step(iterator):
            images, labels = next(iterator)
            with tf.GradientTape() as tape:
                logits = model(images, training=True)
                loss = loss_fn(labels, logits)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            accuracy.update_state(labels, logits)
            return loss

        for epoch in range(EPOCHS):
            accuracy.reset_state()
            losses = [strategy.schedule(step, args=(iterator,)) for _ in range(STEPS_PER_EPOCH)]
            strategy.join()
            loss = sum(future.result() for future in losses) / len(losses)
            print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {float(accuracy.result()):.4f}")

        print(f"{int(optimizer.iterations)} updates of {EPOCHS * STEPS_PER_EPOCH} steps")
        assert int(optimizer.iterations) >= EPOCHS * STEPS_PER_EPOCH
        held_out = keras.ops.argmax(model(held_out_images), axis=1) == held_out_labels
        print(f"held-out accuracy {(share := keras.ops.convert_to_numpy(held_out).mean()):.3f}")
        assert share > 0.95


if __name__ == "__main__":
    main()
