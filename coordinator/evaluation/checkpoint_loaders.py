"""Loads checkpoints into a Keras model: TensorFlow checkpoints, and `.weights.h5` files of `ModelCheckpoint`."""

import os
import tempfile
import warnings
from typing import Any

import h5py
import keras
import tensorflow as tf

from coordinator.errors import EvaluationError
from coordinator.evaluation.checkpoint_file import CheckpointFile
from coordinator.evaluation.checkpoint_loader import require_match, require_step
from coordinator.evaluation.tensorflow_checkpoint import TensorFlowCheckpoint, named_objects

# A loss-scaling optimizer keeps the one that counts inside.
_WEIGHTS_FILE_COUNTERS = ("optimizer/inner_optimizer/vars/0", "optimizer/vars/0")


class KerasModelLoader:
    """A `CheckpointLoader` for a Keras model.

    The weights are loaded, the optimizer's slots are not: evaluation needs none. The optimizer's `iterations` are
    set to the trained step, so that callbacks which read them log at it.

    Args:
      model: the model. One that is compiled but not built is built with the first batch of `data`.
      data: what it will be evaluated on.
    """

    def __init__(self, model: keras.Model, data: Any):
        self._model = model
        self._data = data

    def require_variables(self) -> None:
        """See `CheckpointLoader`."""
        if not self._model.weights and self._model.compiled and isinstance(self._data, tf.data.Dataset):
            self._model.evaluate(self._data.take(1), verbose=0)
        if not self._model.weights:
            raise EvaluationError(
                f"Nothing to load: the model {self._model.name!r} has no weights yet. Build it before it is "
                "evaluated: give it an Input, call model.build(shape), or call it on one batch."
            )

    def load(self, checkpoint: CheckpointFile, path: str) -> int:
        """See `CheckpointLoader`."""
        read = self._load_weights_file if checkpoint.is_keras_weights else self._load_tensorflow
        step = read(checkpoint, path)
        if getattr(self._model, "optimizer", None) is not None:
            self._model.optimizer.iterations.assign(step)
        return step

    def _load_tensorflow(self, checkpoint: CheckpointFile, path: str) -> int:
        # The values are assigned here, not by `tf.train.Checkpoint.read`: that would keep the values which the
        # evaluator's optimizer has no variables for, once more with every checkpoint.
        opened = TensorFlowCheckpoint(path, label=checkpoint.path)
        objects = {"model": self._model} if "model" in opened.names() else named_objects(self._model)
        saved = opened.matches(tf.train.Checkpoint(**objects))
        step = require_step(opened.trained_step(), checkpoint.path)
        require_match([(weight.path, weight) for weight in self._model.weights], saved, checkpoint.path, opened.names())
        for weight in self._model.weights:
            weight.assign(opened.value(saved[id(weight)]))
        return step

    def _load_weights_file(self, checkpoint: CheckpointFile, path: str) -> int:
        # From a copy: a reader locks an HDF5 file, and training that writes it again would fail.
        with tempfile.TemporaryDirectory(prefix="evaluated-") as directory:
            source = CheckpointFile.of_file(path)
            if source is None:
                raise FileNotFoundError(path)
            copy = source.copy_to(os.path.join(directory, "copy"))
            try:
                step = require_step(_trained_step(copy), checkpoint.path)
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

    def __repr__(self) -> str:
        return f"KerasModelLoader({self._model.name!r})"


def _trained_step(path: str) -> int | None:
    with h5py.File(path, "r") as file:
        counters = [file[name] for name in _WEIGHTS_FILE_COUNTERS if name in file]
        steps = [int(counter[()]) for counter in counters if counter.shape == () and counter.dtype.kind in "iu"]
    return steps[0] if steps else None
