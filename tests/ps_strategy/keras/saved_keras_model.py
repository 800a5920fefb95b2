"""A Keras model with a table, an embedding and statistics, saved in every way, and the checks of the loaded models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

STEPS = 6


def make_model() -> Any:
    """Returns a model of words and a number, with a lookup table, an embedding and moving statistics."""
    words, numbers = keras.Input((2,), dtype="string", name="words"), keras.Input((1,), name="numbers")
    found = keras.layers.StringLookup(vocabulary=["a", "b", "c"])(words)
    features = keras.layers.Flatten()(keras.layers.Embedding(4, 2)(found))
    normal = keras.layers.Normalization(mean=3.0, variance=4.0)(numbers)
    hidden = keras.layers.BatchNormalization()(keras.layers.Concatenate()([features, normal]))
    model = keras.Model({"words": words, "numbers": numbers}, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.Adam(0.05), "mse")
    return model


def inputs() -> dict[str, Any]:
    words, numbers = [["a", "b"], ["c", "a"], ["?", "c"]], [[1.0], [5.0], [3.0]]
    return {"words": tf.constant(words), "numbers": tf.constant(numbers)}


def train(model: Any) -> None:
    for _ in range(STEPS):
        model.train_on_batch(inputs(), tf.constant([[1.0], [0.0], [2.0]]))


def save(model: Any, folder: Path) -> None:
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(folder / "checkpoint"))
    model.export(str(folder / "exported"), verbose=False)
    np.savez(folder / "values.npz", *_values(model))
    np.save(folder / "output.npy", model(inputs()))


def load_and_check(folder: Path, device: str) -> tuple[dict[str, Any], Any]:
    """Loads everything; checks values, predictions, and that the names of the variables' devices contain `device`.

    Returns:
      The models, by how they were saved, and what was exported.
    """
    output = np.load(folder / "output.npy")
    with np.load(folder / "values.npz") as saved:
        values = list(saved.values())
    models = {how: load(folder) for how, load in _LOADS.items()}
    for how, model in models.items():
        np.testing.assert_allclose(model(inputs()), output, rtol=1e-5, err_msg=how)
        found = _values(model)
        assert len(found) == len(values), how
        for one, other in zip(found, values, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=how)
        assert all(device in variable.value.device for variable in model.variables), how
    served = tf.saved_model.load(str(folder / "exported"))
    np.testing.assert_allclose(served.serve(inputs()), output, rtol=1e-5)
    return models, served


def _with_weights(folder: Path) -> Any:
    model = make_model()
    model.optimizer.build(model.trainable_variables)
    model.load_weights(folder / "model.weights.h5")
    return model


def _restored(folder: Path) -> Any:
    model = make_model()
    model.optimizer.build(model.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    checkpoint.restore(tf.train.latest_checkpoint(folder)).assert_existing_objects_matched()
    return model


_LOADS: dict[str, Callable[[Path], Any]] = {
    "save": lambda folder: keras.models.load_model(folder / "model.keras"),
    "save_weights": _with_weights,
    "Checkpoint": _restored,
}


def _values(model: Any) -> list[Any]:
    """Returns the values of all variables of the model and its optimizer, the number of steps included."""
    return [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]
