"""Loads checkpoints into the object that is evaluated, and finds the training step in them.

`KerasModelLoader` loads TensorFlow checkpoints and `.weights.h5` files into a Keras model; `TrackableLoader` loads
TensorFlow checkpoints into a `tf.Module` or into the objects that a `tf.train.Checkpoint` names. Both have

    require_variables()      raises `EvaluationError` if the object has no variables that could be loaded
    load(checkpoint, path)   reads the checkpoint from `path` (its own path, or that of a copy); returns its step

Promise: after `load`, every variable holds the value from the checkpoint. If one does not fit, `load` raises. `load`
raises `EvaluationError` if the checkpoint does not fit the object or holds no counter of training steps; and
`tf.errors.OpError`, `OSError`, `IndexError` or `KeyError` if its files cannot be read at the moment.
"""

import os
import tempfile
import warnings
from collections.abc import Iterable
from typing import Any

import h5py
import keras
import tensorflow as tf

from coordinator.errors import EvaluationError
from coordinator.evaluation.checkpoint_file import CheckpointFile
from coordinator.evaluation.tensorflow_checkpoint import SavedVariable, TensorFlowCheckpoint, named_objects

# In a loss-scaling optimizer, the inner optimizer holds the counter.
_WEIGHTS_FILE_COUNTERS = ("optimizer/inner_optimizer/vars/0", "optimizer/vars/0")


class KerasModelLoader:
    """Loads checkpoints into a Keras model.

    The weights are loaded; the optimizer's slot variables are not, since evaluation does not need them. The optimizer's
    `iterations` are set to the training step, for callbacks that read them.

    Args:
      model: the model. If it is compiled but not built, it is built with the first batch of `data`.
      data: the evaluation data.
    """

    def __init__(self, model: keras.Model, data: Any):
        self._model = model
        self._data = data

    def require_variables(self) -> None:
        """Raises `EvaluationError` if the model has no weights and cannot be built."""
        if not self._model.weights and self._model.compiled and isinstance(self._data, tf.data.Dataset):
            self._model.evaluate(self._data.take(1), verbose=0)
        if not self._model.weights:
            raise EvaluationError(
                f"Nothing to load: the model {self._model.name!r} has no weights yet. Build it before it is "
                "evaluated: give it an Input, call model.build(shape), or call it on one batch."
            )

    def load(self, checkpoint: CheckpointFile, path: str) -> int:
        """Loads a TensorFlow checkpoint or a weights file; returns its training step."""
        read = self._load_weights_file if checkpoint.is_keras_weights else self._load_tensorflow
        step = read(checkpoint, path)
        if getattr(self._model, "optimizer", None) is not None:
            self._model.optimizer.iterations.assign(step)
        return step

    def _load_tensorflow(self, checkpoint: CheckpointFile, path: str) -> int:
        # Assigned here rather than by `tf.train.Checkpoint.read`, which keeps the values for which the evaluator's
        # optimizer has no variables, and with each further checkpoint keeps them once more.
        opened = TensorFlowCheckpoint(path, label=checkpoint.path)
        objects = {"model": self._model} if "model" in opened.names() else named_objects(self._model)
        saved = opened.matches(tf.train.Checkpoint(**objects))
        step = _require_step(opened.trained_step(), checkpoint.path)
        _require_match(
            [(weight.path, weight) for weight in self._model.weights], saved, checkpoint.path, opened.names()
        )
        for weight in self._model.weights:
            weight.assign(opened.value(saved[id(weight)]))
        return step

    def _load_weights_file(self, checkpoint: CheckpointFile, path: str) -> int:
        # From a copy: a reader locks an HDF5 file, and training fails if it rewrites the file at that moment.
        with tempfile.TemporaryDirectory(prefix="evaluated-") as directory:
            source = CheckpointFile.of_file(path)
            if source is None:
                raise FileNotFoundError(path)
            copy = source.copy_to(os.path.join(directory, "copy"))
            try:
                step = _require_step(_weights_file_step(copy), checkpoint.path)
                self._load_weights(copy, checkpoint.path)
            except (EvaluationError, KeyError):
                source.require_unchanged()
                raise
            return step

    def _load_weights(self, path: str, label: str) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
                self._model.load_weights(path)
        except ValueError as error:
            raise EvaluationError(
                f"The weights file {label!r} does not fit the model {self._model.name!r}. Build the evaluator's model "
                f"as the trained one was built. Keras says: {error}"
            ) from error


class TrackableLoader:
    """Loads TensorFlow checkpoints into trackable objects.

    Args:
      trackable: a `tf.train.Checkpoint` with the names that training uses (objects that only training needs may be
        left out); or one object, which training saves under the name `model` or as the root.
    """

    def __init__(self, trackable: Any):
        self._trackable = trackable

    def require_variables(self) -> None:
        """Raises `EvaluationError` if the objects have no variables."""
        if not _variables(tf.train.Checkpoint(**self._objects(is_named=True))):
            raise EvaluationError(
                f"Nothing to load: {type(self._trackable).__name__} has no variables yet. Create them before it is "
                "evaluated, for example by calling it once."
            )

    def load(self, checkpoint: CheckpointFile, path: str) -> int:
        """Loads a TensorFlow checkpoint; returns its training step."""
        if checkpoint.is_keras_weights:
            raise EvaluationError(
                f"{checkpoint.path!r} is a Keras weights file and can be loaded into a Keras model only, not into a "
                f"{type(self._trackable).__name__}."
            )
        opened = TensorFlowCheckpoint(path, label=checkpoint.path)
        names = opened.names()
        # A new root each time: a root keeps every value for which it has no object.
        root = tf.train.Checkpoint(**self._objects(is_named="model" in names))
        step = _require_step(opened.trained_step(), checkpoint.path)
        _require_match(_variables(root), opened.matches(root), checkpoint.path, names)
        try:
            root.read(path).assert_existing_objects_matched().expect_partial()
        except (AssertionError, ValueError) as error:
            raise EvaluationError(
                f"The checkpoint {checkpoint.path!r} does not fit what is evaluated: {error} It holds {names}."
            ) from error
        return step

    def _objects(self, is_named: bool) -> dict[str, Any]:
        """Returns the objects to load, by their names at the root of the checkpoint."""
        if is_named and not isinstance(self._trackable, tf.train.Checkpoint):
            return {"model": self._trackable}
        return named_objects(self._trackable)


def _variables(root: tf.train.Checkpoint) -> list[tuple[str, Any]]:
    """Returns (name, variable) for every variable below `root`."""
    found = tf.train.TrackableView(root).descendants()
    keras_variables = [(item.path, item) for item in found if isinstance(item, keras.Variable)]
    return keras_variables + [(item.name, item) for item in found if isinstance(item, tf.Variable)]


def _weights_file_step(path: str) -> int | None:
    with h5py.File(path, "r") as file:
        counters = [file[name] for name in _WEIGHTS_FILE_COUNTERS if name in file]
        steps = [int(counter[()]) for counter in counters if counter.shape == () and counter.dtype.kind in "iu"]
    return steps[0] if steps else None


def _require_step(step: int | None, path: str) -> int:
    """Returns `step`; raises `EvaluationError` if the checkpoint at `path` has none."""
    if step is None:
        raise EvaluationError(
            f"The checkpoint {path!r} holds no counter of training steps, so its metrics have no step. Save the "
            "optimizer with the model, whose `iterations` count steps, or a counter of your own: "
            "tf.train.Checkpoint(model=model, optimizer=optimizer, step=step)."
        )
    return step


def _require_match(
    variables: Iterable[tuple[str, Any]], saved: dict[int, SavedVariable], path: str, names: list[str]
) -> None:
    """Checks that a checkpoint holds every variable with the right shape.

    Args:
      variables: (name, variable) pairs.
      saved: what the checkpoint holds, by `id(variable)`.
      path: the checkpoint, for messages.
      names: the names of the objects at the checkpoint's root, for messages.

    Raises:
      EvaluationError: a variable is missing or has another shape.
    """
    for name, variable in variables:
        if id(variable) not in saved:
            raise EvaluationError(
                f"The checkpoint {path!r} holds no value for the variable {name!r}; it holds {names} at its root. "
                "Evaluate the model that was trained, saved under the name 'model', or pass as model a "
                "tf.train.Checkpoint with the names under which training saves."
            )
        shape = tuple(variable.shape)
        if shape != saved[id(variable)].shape:
            raise EvaluationError(
                f"The variable {name!r} has shape {shape} in the evaluator and {saved[id(variable)].shape} in the "
                f"checkpoint {path!r}. Build the evaluator's model as the trained one was built."
            )
