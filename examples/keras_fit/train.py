"""Trains a Keras model on handwritten digits with `model.fit`, on two workers and a parameter server.

coordinator run --workers 2 --ps 1 examples/keras_fit/train.py

With --rule StaleSynchronous --rule-option get_model_frequency=4 --rule-option max_lead=8 an update rule decides what a
gradient does to the model: any of `coordinator.updates`, with its options.

With --strategy mirrored (without `coordinator run`) or --strategy none, the very same program trains in one process.
"""

import argparse
import ast

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import coordinator


def make_strategy(name):
    if name == "parameter_servers":
        return coordinator.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    return tf.distribute.MirroredStrategy(["/cpu:0"]) if name == "mirrored" else tf.distribute.get_strategy()


def make_rule(name, options, optimizer, model):
    options = {key: ast.literal_eval(value) for key, value in (option.split("=", 1) for option in options)}
    return getattr(coordinator.updates, name)(optimizer, model.trainable_variables, **options)


def train(strategy, directory, rule, rule_options):
    images, labels = load_digits(return_X_y=True)
    images, held_out_images, labels, held_out_labels = train_test_split(images / 16, labels, random_state=0)
    with strategy.scope():
        dense = keras.layers.Dense
        model = keras.Sequential([keras.Input((64,)), dense(128, "relu"), keras.layers.Dropout(0.2), dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.Adam(2e-3)
        model.compile(
            make_rule(rule, rule_options, optimizer, model) if rule else optimizer, loss, metrics=["accuracy"]
        )
    best = f"{directory}/best.keras"
    callbacks = [
        keras.callbacks.ModelCheckpoint(best, monitor="val_accuracy", save_best_only=True),
        keras.callbacks.EarlyStopping(monitor="val_accuracy", patience=8),
        keras.callbacks.TensorBoard(directory),
    ]
    held_out = (held_out_images, held_out_labels)
    fit = model.fit(images, labels, batch_size=64, epochs=25, validation_data=held_out, callbacks=callbacks, verbose=2)
    accuracy = keras.models.load_model(best).evaluate(*held_out, verbose=0)[1]
    print(f"{len(fit.history['loss'])} epochs; the best model, loaded again: held-out accuracy {accuracy:.3f}")
    assert accuracy > 0.95


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default="logs/keras_fit", help="for the best model and summaries")
    parser.add_argument("--strategy", default="parameter_servers", choices=["parameter_servers", "mirrored", "none"])
    parser.add_argument("--rule", help="the name of an update rule; without it, the optimizer alone", metavar="NAME")
    parser.add_argument("--rule-option", action="append", default=[], help="of the rule", metavar="NAME=VALUE")
    arguments = parser.parse_args()
    train(make_strategy(arguments.strategy), arguments.directory, arguments.rule, arguments.rule_option)
