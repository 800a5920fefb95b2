"""Loads TensorFlow checkpoints into a `tf.Module`, or into whatever a `tf.train.Checkpoint` names."""

from typing import Any

import keras
import tensorflow as tf

from coordinator.errors import EvaluationError
from coordinator.evaluation.checkpoint_file import CheckpointFile
from coordinator.evaluation.checkpoint_loader import require_match, require_step
from coordinator.evaluation.tensorflow_checkpoint import TensorFlowCheckpoint, named_objects


class TrackableLoader:
    """A `CheckpointLoader` for trackable objects.

    Args:
      trackable: a `tf.train.Checkpoint` that names the objects as training's does (objects that only training needs
        may be left out); or one object, which training saves under the name `model` or as the root.
    """

    def __init__(self, trackable: Any):
        self._trackable = trackable

    def require_variables(self) -> None:
        """See `CheckpointLoader`."""
        if not _variables(tf.train.Checkpoint(**self._objects(is_named=True))):
            raise EvaluationError(
                f"Nothing to load: {type(self._trackable).__name__} has no variables yet. Create them before it is "
                "evaluated, as by calling it once."
            )

    def load(self, checkpoint: CheckpointFile, path: str) -> int:
        """See `CheckpointLoader`."""
        if checkpoint.is_keras_weights:
            raise EvaluationError(
                f"{checkpoint.path!r} is a Keras weights file and can be loaded into a Keras model only, not into a "
                f"{type(self._trackable).__name__}."
            )
        opened = TensorFlowCheckpoint(path, label=checkpoint.path)
        names = opened.names()
        # A new root each time: one that lives on would keep every value that it has no object for.
        root = tf.train.Checkpoint(**self._objects(is_named="model" in names))
        step = require_step(opened.trained_step(), checkpoint.path)
        require_match(_variables(root), opened.matches(root), checkpoint.path, names)
        try:
            root.read(path).assert_existing_objects_matched().expect_partial()
        except (AssertionError, ValueError) as error:
            raise EvaluationError(
                f"The checkpoint {checkpoint.path!r} does not fit what is evaluated: {error} It holds {names}."
            ) from error
        return step

    def _objects(self, is_named: bool) -> dict[str, Any]:
        """What is loaded, by the names that it has at the root of a checkpoint."""
        if is_named and not isinstance(self._trackable, tf.train.Checkpoint):
            return {"model": self._trackable}
        return named_objects(self._trackable)

    def __repr__(self) -> str:
        return f"TrackableLoader({type(self._trackable).__name__})"


def _variables(root: tf.train.Checkpoint) -> list[tuple[str, Any]]:
    everything = tf.train.TrackableView(root).descendants()
    return [(_name(item), item) for item in everything if isinstance(item, (tf.Variable, keras.Variable))]


def _name(variable: Any) -> str:
    return variable.path if isinstance(variable, keras.Variable) else variable.name
